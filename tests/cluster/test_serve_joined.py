"""A deployment that joins an existing Ray cluster: it leaves the cluster as it was, also when it is stopped at once, and
outlives its supervisor until the next one takes it over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.command import COMMAND, Command

pytestmark = pytest.mark.deployment

CLUSTER = """
import json, sys, ray
from ray.util.placement_group import placement_group_table
info = ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=sys.argv[1])
print(info.address_info["address"], flush=True)
for _ in sys.stdin:
    groups = [one["state"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
    actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    print(json.dumps([ray.available_resources().get("CPU", 0), groups, sorted(actors)]), flush=True)
ray.shutdown()
"""
EMPTY = '[3.0, [], []]'
OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster_and_address() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        made = subprocess.Popen([sys.executable, "-c", CLUSTER, folder], env=os.environ | OPEN, start_new_session=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        yield made, line(made)
        made.communicate(timeout=60)


@pytest.fixture
def cluster(cluster_and_address: tuple[subprocess.Popen[str], str]) -> Iterator[subprocess.Popen[str]]:
    """It is empty before and after each test."""
    made = cluster_and_address[0]
    assert ask(made) == EMPTY
    yield made
    deadline = time.monotonic() + 40
    while (left := ask(made)) != EMPTY:
        assert time.monotonic() < deadline, left


@pytest.fixture
def settings(cluster_and_address: tuple[subprocess.Popen[str], str]) -> list[str]:
    return ["serve", "--set", "router.port=0", "--set", f"ray.address={cluster_and_address[1]}"]


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return line(process)


@pytest.mark.timeout(240)
def test_a_joined_cluster_stays_as_it_was(cluster: subprocess.Popen[str], settings: list[str]) -> None:
    served = Command(settings, OPEN)
    try:
        url = served.wait_for(r"ready at (http://\S+);")[1]
        assert ask(cluster) == '[0.5, ["CREATED", "CREATED", "CREATED"], ["decode-0/1", "lease", "prefill-0/1", "router-0/1"]]'

        second = Command([*settings, "--set", "ray.placement_seconds=1", "--set", "ray.deployment=other"], OPEN)
        try:
            assert second.wait() == 1
            assert "prefill-0 needs CPU 1 on one node" in second.text
        finally:
            second.clean_up()

        long = subprocess.Popen([COMMAND, "chat", "Count 1 to 400.", "--max-tokens", "1500", "--url", url], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert long.stdout is not None
        assert long.stdout.read(1) == "1"
        served.signal(signal.SIGINT)
        served.wait_for("press Ctrl-C again")
        time.sleep(0.5)  # closer together, the two signals are one wish
        pids = pids_in(served, "serves")
        os.kill(pids["decode-0"], signal.SIGSTOP)  # it does not see the end of its actor
        served.signal(signal.SIGINT)
        assert served.wait(60) == 130, served.text
        _, complaint = long.communicate(timeout=60)
        assert "broke off" in complaint
        assert served.processes() == []
        assert running(pids) == []
    finally:
        served.clean_up()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_next_supervisor_takes_over_what_serves(cluster: subprocess.Popen[str], settings: list[str]) -> None:
    first = Command(settings, OPEN)
    runs = [first]
    try:
        url = first.wait_for(r"ready at (http://\S+);")[1]
        pids = pids_in(first, "serves")
        long = subprocess.Popen([COMMAND, "chat", "Count 113 to 142.", "--url", url], stdout=subprocess.PIPE, text=True)
        assert long.stdout is not None
        begun = long.stdout.read(3)
        first.signal(signal.SIGKILL)
        first.wait()
        assert begun + long.stdout.read() == ", ".join(map(str, range(113, 143))) + ".\n"
        assert counts(url), "no supervisor, no service"

        second = Command(settings, OPEN)
        runs.append(second)
        assert second.wait_for(r"ready at (http://\S+);")[1] == url
        assert pids_in(second, "goes on") == pids
        with urllib.request.urlopen(second.wait_for(r"metrics: (\S+)")[1], timeout=30) as answer:
            assert 'slipstream_supervisor_adopted_total{role="decode"} 1.0' in answer.read().decode()
        third = Command(settings, OPEN)
        runs.append(third)
        assert third.wait() == 1
        assert f"deployment slipstream of this cluster is kept by another supervisor (process {second.pid} on" in third.text
        assert "what serves goes on" not in third.text, "it has nothing to say about that"

        os.kill(pids["prefill-0"], signal.SIGKILL)
        second.wait_for(r"(?s)prefill-0 ended with signal SIGKILL; starting epoch 2.*prefill-0 serves at")
        deadline = time.monotonic() + 60
        while not counts(url):
            assert time.monotonic() < deadline, "the router does not follow the new supervisor"

        second.signal(signal.SIGSTOP)  # it sleeps for longer than its lease
        fourth = Command(settings, OPEN)
        runs.append(fourth)
        fourth.wait_for("ready at")
        assert pids_in(fourth, "goes on") == pids | pids_in(second, "serves")
        second.signal(signal.SIGTERM)
        second.signal(signal.SIGCONT)
        assert second.wait() in (1, 130)  # it may see what it has lost before the signal, which is a second wish to end then
        assert "what serves goes on" in second.text
        assert counts(url)
        fourth.signal(signal.SIGTERM)
        assert fourth.wait() == 0, fourth.text
        assert running(pids, pids_in(second, "serves")) == []
    finally:
        for one in runs:
            one.clean_up()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_supervisor_killed_while_it_starts_or_drains_is_in_nobodys_way(cluster: subprocess.Popen[str],
                                                                         settings: list[str]) -> None:
    runs = [Command(settings, OPEN)]
    try:
        deadline = time.monotonic() + 60
        while "prefill-0/1" not in ask(cluster):
            assert time.monotonic() < deadline, runs[0].text
        runs[0].signal(signal.SIGKILL)

        runs.append(Command(settings, OPEN))
        url = runs[1].wait_for(r"ready at (http://\S+);")[1]
        long = subprocess.Popen([COMMAND, "chat", "Count 113 to 142.", "--url", url], stdout=subprocess.PIPE, text=True)
        assert long.stdout is not None
        begun = long.stdout.read(3)
        runs[1].signal(signal.SIGTERM)
        runs[1].wait_for("press Ctrl-C again")
        runs[1].signal(signal.SIGKILL)
        assert begun + long.stdout.read() == ", ".join(map(str, range(113, 143))) + ".\n"

        runs.append(Command(settings, OPEN))
        url = runs[2].wait_for(r"ready at (http://\S+);")[1]
        deadline = time.monotonic() + 60
        while not counts(url):
            assert time.monotonic() < deadline, runs[2].text
        runs[2].signal(signal.SIGTERM)
        assert runs[2].wait() == 0, runs[2].text
        assert running(*(pids_in(run, word) for run in runs for word in ("serves", "goes on"))) == []
    finally:
        for one in runs:
            one.clean_up()


def pids_in(run: Command, word: str) -> dict[str, int]:
    """Processes that `run` says it has started, or taken over."""
    return {name: int(pid) for name, pid in re.findall(rf"(\S+) {word} at \S+ \(pid (\d+)", run.text)}


def running(*pids: dict[str, int]) -> list[int]:
    return [pid for some in pids for pid in some.values() if os.path.exists(f"/proc/{pid}")]


def counts(url: str) -> bool:
    return subprocess.run([COMMAND, "chat", "Count 3 to 5.", "--url", url], capture_output=True, text=True,
                          timeout=60).stdout == "3, 4, 5.\n"


@pytest.mark.timeout(60)
def test_a_cluster_that_does_not_answer_is_named() -> None:
    done = subprocess.run([COMMAND, "serve", "--set", "ray.address=127.0.0.1:1"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert done.stderr == "slipstream: cannot join the Ray cluster at 127.0.0.1:1: [Errno 111] Connection refused\n"
