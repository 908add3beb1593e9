"""Importing the product changes nothing in the process that imports it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("cache_transfer", "decode", "launch", "prefill", "router", "slipstream", "slipstream_client", "worker")

PROBE = """
import importlib, json, logging, os, pkgutil, signal, sys, threading

# Importing importlib.resources makes it an attribute of importlib: that is what an import is.
submodules = ("abc", "machinery", "metadata", "readers", "resources", "simple", "util")

def state():
    signals = {s.name: repr(signal.getsignal(s)) for s in signal.Signals}
    return {
        "os": {key: id(value) for key, value in vars(os).items() if not key.startswith("__")},
        "os.path": {key: id(value) for key, value in vars(os.path).items()},
        "importlib": {key: id(value) for key, value in vars(importlib).items() if key not in submodules},
        "import hooks": [repr(one) for one in (*sys.meta_path, *sys.path_hooks)],
        "sys.path": list(sys.path),
        "environment": dict(os.environ),
        "signals": signals,
        "logging": [repr(logging.root.handlers), logging.root.level, logging.root.disabled],
        "threads": [one.name for one in threading.enumerate()],
        "folder": os.getcwd(),
    }

def modules(package):
    module = importlib.import_module(package)
    yield package
    for info in pkgutil.walk_packages(module.__path__, package + "."):
        yield info.name

before = state()
imported = [name for package in json.loads(sys.argv[1]) for name in modules(package) if importlib.import_module(name)]
after = state()
changed = {}
for key, was in before.items():
    now = after[key]
    if was != now:
        changed[key] = [k for k in {**was, **now} if was.get(k) != now.get(k)] if isinstance(was, dict) else [was, now]
print(json.dumps({"imported": imported, "changed": changed}, default=str))
"""


def probe(packages: Sequence[str], folder: Path | None = None) -> tuple[list[str], dict[str, Any]]:
    """(modules imported, what that changed) in a fresh process."""
    command = [sys.executable, "-c", PROBE, json.dumps(packages)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    return result["imported"], result["changed"]


def test_importing_every_module_changes_nothing() -> None:
    imported, changed = probe(PACKAGES)
    assert len(imported) > 50
    assert changed == {}


@pytest.mark.parametrize("package", ["router", "launch.cli", "slipstream_client"])
def test_light_processes_stay_light(package: str) -> None:
    """The router and the command line import neither torch nor Ray nor transformers."""
    code = (f"import importlib, pkgutil, sys\nm = importlib.import_module({package!r})\n"
            "[importlib.import_module(i.name) for i in pkgutil.walk_packages(getattr(m, '__path__', []), m.__name__ + '.')]\n"
            "print(*[n for n in ('torch', 'ray', 'transformers', 'safetensors') if n in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_worker_imports_no_more_than_it_runs() -> None:
    """Torch's compiler, which some operators import on the meta device, would double the time that a worker takes to start."""
    code = """
import sys
from slipstream import checkpoint
from slipstream.config import EngineConfig, ModelConfig
from slipstream.engine.build import build
from tests.support.engine_driver import request, run
from tests.support.samples import Samples
import decode.service, prefill.service, worker.process
demo = checkpoint.read(checkpoint.DEMO)
engine = build(demo, ModelConfig(device="cpu"), EngineConfig(kv_cache_tokens=1024, max_running=1))
sample = next(one for one in Samples(demo).all() if one.pixels)
engine.submit(request("r", sample.tokens, 3, grids=sample.grids, ignore_eos=True, temperature=1.0), sample.pixels)
assert len(run(engine).tokens["r"]) == 3
print(*[n for n in ("ray", "sympy", "torch._dynamo", "torch._inductor", "transformers") if n in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_probe_sees_a_module_that_changes_the_process(tmp_path: Path) -> None:
    """The check itself: a package that touches the environment and os is caught."""
    folder = tmp_path / "meddler"
    folder.mkdir()
    (folder / "__init__.py").write_text("import os\nos.environ['MEDDLED'] = '1'\nos.getpid = lambda: 0\n")
    _, changed = probe(["meddler"], folder.parent)
    assert changed["environment"] == ["MEDDLED"]
    assert changed["os"] == ["getpid"]
