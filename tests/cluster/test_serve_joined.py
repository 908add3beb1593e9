"""A deployment that joins an existing Ray cluster: it leaves the cluster as it was, also when it is stopped at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
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
    print(json.dumps({"free": ray.available_resources().get("CPU", 0), "groups": groups}), flush=True)
ray.shutdown()
"""
OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def cluster() -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder:
        made = subprocess.Popen([sys.executable, "-c", CLUSTER, folder], env=os.environ | OPEN, start_new_session=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        yield made
        made.communicate(timeout=60)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return line(process)


@pytest.mark.timeout(240)
def test_a_joined_cluster_stays_as_it_was(cluster: subprocess.Popen[str]) -> None:
    address = line(cluster)
    settings = ["serve", "--set", "router.port=0", "--set", f"ray.address={address}"]
    served = Command(settings, OPEN)
    try:
        url = served.wait_for(r"ready at (http://\S+);")[1]
        assert ask(cluster) == '{"free": 0.5, "groups": ["CREATED", "CREATED", "CREATED"]}'

        second = Command([*settings, "--set", "ray.placement_seconds=1"], OPEN)
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
        served.signal(signal.SIGINT)
        assert served.wait(20) == 130, served.text
        _, complaint = long.communicate(timeout=20)
        assert "broke off" in complaint
        assert served.processes() == []
    finally:
        served.clean_up()
    deadline = time.monotonic() + 20
    while (left := ask(cluster)) != '{"free": 3.0, "groups": []}':
        assert time.monotonic() < deadline, left


@pytest.mark.timeout(60)
def test_a_cluster_that_does_not_answer_is_named() -> None:
    done = subprocess.run([COMMAND, "serve", "--set", "ray.address=127.0.0.1:1"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert done.stderr == "slipstream: cannot join the Ray cluster at 127.0.0.1:1: [Errno 111] Connection refused\n"
