"""`slipstream serve` as a Ray job: the product lies in the job's working_dir only, and every node finds it there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import COMMAND, Command
from tests.support.ray_nodes import OPEN, RayNodes, ray_nodes

pytestmark = pytest.mark.deployment

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(COMMAND).parent / "ray")
PACKAGES = ("cache_transfer", "decode", "launch", "prefill", "router", "slipstream", "client/slipstream_client", "worker")
VERSION = "0.0.0.job"
CONFIG = """
[pools.prefill]
role = "prefill"
cpus = 0.5
labels = { kind = "head" }

[pools.decode]
role = "decode"
pp = 2
cpus = 0.5
labels = { kind = "other" }

[router]
port = 0
cpus = 0.5

[ray]
address = "auto"
"""
FREE = {"head": {"CPU": 1, "GPU": 0, "nic": 0}, "other": {"CPU": 1, "GPU": 0, "nic": 0}}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with all that we need, but without Slipstream."""
    folder = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    site = next(folder.glob("lib/python*/site-packages"))
    # Folders that a .pth file names are searched, but not for .pth files of their own: such as that of an editable install.
    site.joinpath("parts.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    made = str(folder / "bin" / "python")
    done = subprocess.run([made, "-c", "import ray, torch; import launch"], capture_output=True, text=True, cwd=folder,
                          env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, timeout=60)
    assert done.stderr.strip().endswith("No module named 'launch'"), done.stderr
    return made


@pytest.fixture(scope="module")
def cluster(python: str) -> Iterator[tuple[RayNodes, str]]:
    """Two nodes, and the address of the dashboard, which takes jobs."""
    # By default the agents, which start jobs, of all nodes of all clusters of a machine listen at one port: one of them does.
    port, *agents = free_ports(3)
    head = {"num_cpus": 1, "labels": {"kind": "head"}, "include_dashboard": True, "dashboard_host": "127.0.0.1",
            "dashboard_port": port, "min_worker_port": 0, "max_worker_port": 0, "dashboard_agent_listen_port": agents[0]}
    other = {"num_cpus": 1, "labels": {"kind": "other"}, "dashboard_agent_listen_port": agents[1]}
    with ray_nodes([head, other], python) as nodes:
        yield nodes, f"http://127.0.0.1:{port}"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def job(dashboard: str, verb: str, *arguments: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run([RAY, "job", verb, "--address", dashboard, *arguments], env=os.environ | OPEN,
                              capture_output=True, text=True, timeout=90)
        if "No available agent" not in done.stderr or time.monotonic() > deadline:  # a cluster that has just begun
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout


def until_it_says(dashboard: str, name: str, pattern: str) -> str:
    deadline = time.monotonic() + 90
    while (found := re.search(pattern, log := job(dashboard, "logs", name))) is None:
        assert "failed" not in job(dashboard, "status", name).lower(), log
        assert time.monotonic() < deadline, log
        time.sleep(0.5)
    return found[1]


def processes_of(folder: str) -> list[str]:
    """Command lines of what runs code from a working_dir of this cluster."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            cwd, line = os.readlink(f"/proc/{entry}/cwd"), Path(f"/proc/{entry}/cmdline").read_text()
        except OSError:
            continue
        if folder in cwd and " -m" in line.replace("\0", " "):
            found.append(line.replace("\0", " ")[:80])
    return found


@pytest.mark.timeout(180)
def test_a_job_brings_its_code_serves_and_leaves_nothing(cluster: tuple[RayNodes, str], tmp_path: Path) -> None:
    nodes, dashboard = cluster
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "slipstream" / "__init__.py").write_text(f'__version__ = "{VERSION}"\n')
    (tmp_path / "job.toml").write_text(CONFIG)
    job(dashboard, "submit", "--submission-id", "served", "--no-wait", "--working-dir", str(tmp_path),
        "--runtime-env-json", '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}',
        "--", "python", "-m", "launch", "serve", "--config", "job.toml")
    url = until_it_says(dashboard, "served", r"ready at (http://\S+);")
    said = subprocess.run([COMMAND, "chat", "Count 3 to 5.", "--url", url], capture_output=True, text=True, timeout=60)
    assert said.stdout == "3, 4, 5.\n", said.stderr
    with urllib.request.urlopen(f"{url}/status", timeout=30) as answer:
        rows = json.load(answer)["replicas"]
    assert {(row["replica_id"], row["version"]) for row in rows} == {("prefill-0", VERSION), ("decode-0", VERSION)}
    state = nodes.state()
    assert state["groups"] == ["decode-0", "prefill-0", "router-0"]
    assert [state["free"][kind]["CPU"] for kind in ("head", "other")] == [0, 0]
    assert len(processes_of("_ray_pkg_")) >= 5, "the supervisor, a router and three ranks"

    job(dashboard, "stop", "served")
    assert "STOPPED" in job(dashboard, "status", "served").upper()
    log = job(dashboard, "logs", "served")
    assert "stopping; running answers may go on" in log
    assert not re.search("what serves goes on|could not|kills this job|Traceback", log), log
    nodes.until(free=FREE, groups=[], actors=[])
    assert processes_of("_ray_pkg_") == []


@pytest.mark.timeout(90)
def test_a_node_without_the_product_is_named(cluster: tuple[RayNodes, str]) -> None:
    nodes, _ = cluster
    # Ray's workers look in the driver's folder too, where it is on their node.
    run = Command(["serve", "--set", f"ray.address={nodes.address}"], OPEN, cwd="/")
    try:
        begun = time.monotonic()
        assert run.wait() == 1, run.text
        assert re.search(r"node \S+ of the Ray cluster cannot import Slipstream: install this version on every node, or submit "
                         r"`serve` as a Ray job .*No module named 'launch'", run.text), run.text
        assert time.monotonic() - begun < 20
    finally:
        run.clean_up()
    nodes.until(groups=[], actors=[])
