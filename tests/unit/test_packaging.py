"""What the tree and the installed distribution hold, and what they must not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cli import DEFAULT_URL, app
from launch.client import DEFAULT_URL as CLIENT_URL
from slipstream import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def tracked() -> list[Path]:
    """Files of the repository, or of the unpacked source distribution."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_package_of_the_tree_is_packaged() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in tracked() if path.name == "__init__.py"} - {"tests", "bench"}
    assert found == set(PACKAGES)


def test_proto_is_no_package() -> None:
    """Its name belongs to proto-plus, which other libraries install."""
    assert not list((ROOT / "proto").rglob("*.py"))


def test_no_other_distribution_owns_a_name_of_ours() -> None:
    owners = metadata.packages_distributions()
    for name in PACKAGES:
        assert set(owners.get(name, [])) <= {PROJECT["project"]["name"]}, f"{name} is owned by {owners[name]}"


def test_no_path_of_a_machine_stands_in_the_tree() -> None:
    pattern = re.compile(rb"/(?:wor" rb"k|roo" rb"t|hom" rb"e|User" rb"s)/[A-Za-z0-9_.]")
    hits = [f"{path.relative_to(ROOT)}: {match.group()!r}" for path in tracked()
            if path.suffix not in {".png", ".safetensors"} and (match := pattern.search(path.read_bytes()))]
    assert hits == []


def test_pins_lie_in_the_ranges_and_leave_torch_alone() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert all(pins.values()), "every constraint is an exact version"
    assert not [name for name in pins if name in {"torch", "triton"} or name.startswith("nvidia")]
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]
    for requirement in map(Requirement, wanted):
        if requirement.name not in {"torch", "slipstream"}:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_what_is_imported_is_declared() -> None:
    """A module that is installed by chance, or by a tool of development, is missing on somebody else's machine."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    extras = PROJECT["project"]["optional-dependencies"]
    declared = {canonicalize_name(Requirement(one).name)
                for one in [*PROJECT["project"]["dependencies"], *extras["worker"], *extras["ray"], *extras["smollm2"]]}
    owners = metadata.packages_distributions()
    missing = set()
    for path in tracked():
        if path.suffix != ".py" or path.relative_to(ROOT).parts[0] not in PACKAGES:
            continue
        for name in imported(path) - {*PACKAGES, "bench"} - sys.stdlib_module_names:
            if not declared & {canonicalize_name(owner) for owner in owners.get(name, [])}:
                missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert missing == set()


def imported(path: Path) -> set[str]:
    """Top-level names that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_every_tracked_script_is_executable() -> None:
    for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]:
        if path.is_file():
            assert path.stat().st_mode & 0o111, path


def test_the_command_line_names_the_client_s_default_url() -> None:
    """Written twice so that `--help` does not import the client."""
    assert DEFAULT_URL == CLIENT_URL


def test_the_command_tells_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"slipstream {__version__}\n"
