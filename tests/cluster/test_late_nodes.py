"""Room that comes while a deployment waits for it, and actors that live as long as their place; on a real Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.ray_nodes import OPEN, ray_nodes

pytestmark = pytest.mark.deployment

CHILD = """
import asyncio, gc, sys, time
from launch import placement, session
from launch.members import members
from slipstream import config
from slipstream.errors import PlacementError

ray = session.Session(sys.argv[1], "late", cpus=0, gpus=0)
wanted = members(config.load(None, ["pools.prefill.role=prefill", "pools.prefill.tp=2", "pools.prefill.cpus=1"]))[:1]
try:
    placement.reserve(wanted, {}, "late", 0.5, lifetime=None)
except PlacementError as error:
    print(error, flush=True)
began = time.monotonic()
place = placement.reserve(wanted, {}, "late", 40, lifetime=None)[0]
print(f"placed after {time.monotonic() - began:.2f}", flush=True)

async def alive():
    place.new_hosts()
    gc.collect()
    await asyncio.sleep(3)
    gc.collect()
    return await place._all(host.stop.remote(0) for host in place._hosts)

print(asyncio.run(alive()), flush=True)
place.kill()
place.release()
ray.close()
"""


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_node_that_joins_is_waited_for_and_actors_outlive_a_collection() -> None:
    """RAY-06: one of two nodes at the start, the other one later. RAY-09: nothing else than the place holds the actors."""
    with ray_nodes([{"num_cpus": 1}]) as cluster:
        child = subprocess.Popen([sys.executable, "-c", CHILD, cluster.address], env=os.environ | OPEN, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert "needs CPU 2 on one node: node" in child.stdout.readline(), "what is missing is named"
            cluster.add(num_cpus=2)
            assert child.stdout.readline().startswith("placed after")
            assert child.stdout.readline() == "[0, 0]\n"
            _, errors = child.communicate(timeout=30)
            assert child.returncode == 0, errors
        finally:
            child.kill()
        cluster.until(groups=[], actors=[])
