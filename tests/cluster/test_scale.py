"""`slipstream scale` under load: replicas come and go, no request is lost, and the next supervisor knows the numbers."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from typing import Any

import httpx
import pytest

from tests.support.command import COMMAND, Command
from tests.support.ray_nodes import OPEN, ray_nodes
from tests.support.traffic import Reply, asks, send

pytestmark = pytest.mark.deployment

SETTINGS = ["pools.prefill.cpus=0.5", "pools.decode.cpus=0.5", "router.cpus=0.5", "router.port=0", "ray.placement_seconds=3"]
READY = r"ready at (http://\S+); .*supervisor: (\S+?);"


def scale(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([COMMAND, "scale", *arguments], capture_output=True, text=True, timeout=90)
    return done.returncode, done.stdout + done.stderr


async def replicas(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    return {one["replica_id"]: one for one in (await client.get("/status")).json()["replicas"]}


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_replicas_come_and_go_under_load() -> None:
    kinds = [ask for ask in asks() if ask.name.startswith(("long-4", "long-5", "sampled-11", "img_two-0"))]
    with ray_nodes([{"num_cpus": 3, "labels": {"kind": "head"}}]) as nodes:
        options = [part for setting in [*SETTINGS, f"ray.address={nodes.address}"] for part in ("--set", setting)]
        runs = [Command(["serve", *options], OPEN)]
        try:
            url, supervisor = (await asyncio.to_thread(runs[0].wait_for, READY)).groups()
            async with httpx.AsyncClient(base_url=url, timeout=90) as client:
                right = await asyncio.gather(*(send(client, ask, stream=False) for ask in kinds))
                assert not [reply.error for reply in right if reply.error]
                over, wrong, done = asyncio.Event(), list[Reply](), 0

                async def load(first: int) -> None:
                    nonlocal done
                    number = first % len(kinds)
                    while not over.is_set():
                        reply = await send(client, kinds[number], stream=bool(first % 2))
                        if reply.error or reply != right[number]:
                            wrong.append(reply)
                        done, number = done + 1, (number + 1) % len(kinds)

                loads = [asyncio.create_task(load(first)) for first in range(6)]
                assert await asyncio.to_thread(scale, "decode=2", "prefill=2", "--url", url) == (0, "decode 2\nprefill 2\n")
                assert set(await replicas(client)) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
                async with asyncio.timeout(60):
                    while not (await replicas(client))["decode-1"]["load"]["running"]:
                        pass
                before = done
                assert await asyncio.to_thread(scale, "decode=1", "--supervisor", supervisor) == (0, "decode 1\nprefill 2\n")
                over.set()
                await asyncio.gather(*loads)
                assert (wrong, done > before) == ([], True)
                assert "decode-1" not in await replicas(client)

                for wish, refusal in [("decode=9", "needs CPU 0.5 on one node, but what is free"),
                                      ("decode=0", "a deployment needs a decode replica"), ("x=1", "there is no pool 'x'")]:
                    code, said = await asyncio.to_thread(scale, wish, "--url", url)
                    assert (code, refusal in said) == (1, True), said
                assert await asyncio.to_thread(scale, "decode=2", "--url", url) == (0, "decode 2\nprefill 2\n")
                runs[0].signal(signal.SIGKILL)
                runs[0].wait()
                runs.append(Command(["serve", *options], OPEN))
                await asyncio.to_thread(runs[1].wait_for, READY)
                assert set(re.findall(r"(\S+) goes on at", runs[1].text)) == {"prefill-0", "prefill-1", "decode-0", "decode-1",
                                                                             "router-0"}
                assert (await replicas(client))["decode-1"]["epoch"] > 1, "no two of a name have the same epoch"
                assert await asyncio.to_thread(scale, "decode=1", "prefill=1", "--url", url) == (0, "decode 1\nprefill 1\n")
                assert not (await send(client, kinds[0], stream=True)).error
            runs[1].signal(signal.SIGTERM)
            assert await asyncio.to_thread(runs[1].wait) == 0, runs[1].text
            await asyncio.to_thread(lambda: nodes.until(free={"head": {"CPU": 3, "GPU": 0, "nic": 0}}, groups=[], actors=[]))
        finally:
            for one in runs:
                one.clean_up()
