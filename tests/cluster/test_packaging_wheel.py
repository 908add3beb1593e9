"""The wheel: what it holds, and that its command runs from a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the product; that of the client, of which it needs the messages, lies beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    for source in (ROOT, ROOT / "client"):
        done = subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=source,
                              capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    (path,) = folder.glob("slipstream-*.whl")
    return path


def test_the_wheel_holds_the_product_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    model = ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md")
    assert names >= {f"slipstream/demo_model/{name}" for name in model}
    assert names >= {"launch/demo_data/grid.png", "launch/demo_data/questions.json", "prefill/__main__.py"}
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"cache_transfer", "decode", "launch", "prefill", "router", "slipstream", "worker"}


def test_the_wheel_runs_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*install, *map(str, wheel.parent.glob("*.whl"))], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    # The dependencies come from here; our own packages must come from the wheel, so nothing of this checkout is in reach.
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    outer = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(f"{outer}\n")
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = ("import launch, slipstream.checkpoint as c; print(launch.__file__); print(c.DEMO);"
            "print((c.DEMO / 'model.safetensors').stat().st_size)")
    done = subprocess.run([str(python), "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60,
                          env=alone)
    assert done.returncode == 0, done.stderr
    module, demo, size = done.stdout.split()
    assert Path(module).is_relative_to(tmp_path)
    assert Path(demo).is_relative_to(tmp_path)
    assert int(size) > 10_000_000
    for command, says in (([str(python.parent / "slipstream"), "--help"], "demo"),
                          ([str(python), "-P", "-m", "router", "--help"], "--worker")):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=alone)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout


def test_help_is_immediate() -> None:
    command = [str(Path(sys.executable).parent / "slipstream"), "--help"]
    best = min(_processor_seconds(command) for _ in range(5))
    assert best < 0.3


def _processor_seconds(command: list[str]) -> float:
    """Processor time rather than wall time: what else the machine does is not the command's fault."""
    before, started = os.times(), time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return min(used, time.monotonic() - started)
