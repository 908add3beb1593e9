"""One rank of a replica is killed under load: its other ranks end at once, and nobody hears a wrong token."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.traffic import asks, send, until_healthy
from tests.support.worker_client import pair

SECONDS_TO_END = 5.0
SECONDS_TO_NOTICE = 5.0
"""That a rank is silent."""


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_replica_without_one_of_its_ranks_is_none(tmp_path: Path, rank: int) -> None:
    cluster = Cluster(tmp_path)
    kinds = [ask for ask in asks() if ask.name.startswith(("long", "sampled", "img_two"))]
    try:
        single = cluster.start_workers("prefill", "decode")
        gangs = {"prefill": cluster.start_gang("prefill", 2, 1), "decode": cluster.start_gang("decode", 1, 2)}
        alone = cluster.start_router(single)
        router = cluster.start_router([*single, *(ranks[0] for ranks in gangs.values())])
        async with (httpx.AsyncClient(base_url=f"http://{alone.address}", timeout=60) as one,
                    httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60) as client):
            await asyncio.gather(until_healthy(one, 30), until_healthy(client, 30))
            right = await asyncio.gather(*(send(one, ask, stream=False) for ask in kinds))
            asking = [asyncio.create_task(send(client, ask, stream=True)) for ask in kinds * 2]
            for ranks in gangs.values():
                await asyncio.wait(asking, timeout=1.5)
                cluster.kill(ranks[rank])
                killed = time.monotonic()
                for other in ranks:
                    if other is not ranks[rank]:
                        await asyncio.to_thread(other.child.wait, SECONDS_TO_END + 1)
                        cluster.forget(other)
                assert time.monotonic() - killed < SECONDS_TO_END
            found = await asyncio.wait_for(asyncio.gather(*asking), 60)
            assert not [reply.error for reply in found if reply.error]
            assert found == right * 2
        async with pair(single[0].address, single[1].address) as held:
            await held.until_empty(10)
    finally:
        cluster.close()


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
async def test_a_rank_0_that_hangs_takes_its_ranks_with_it(tmp_path: Path, tp: int, pp: int) -> None:
    """Its neighbour waits for it in the middle of a step, for longer than anybody should."""
    cluster = Cluster(tmp_path)
    (ask,) = [ask for ask in asks() if ask.name == "long-7"]
    gang = []
    try:
        prefill, decode = cluster.start_workers("prefill", "decode")
        gang = cluster.start_gang("decode", tp, pp)
        alone, router = cluster.start_router([prefill, decode]), cluster.start_router([prefill, gang[0]])
        async with (httpx.AsyncClient(base_url=f"http://{alone.address}", timeout=60) as one,
                    httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60) as client):
            await asyncio.gather(until_healthy(one, 30), until_healthy(client, 30))
            right = await send(one, ask, stream=False)
            assert await send(client, ask, stream=True) == right
            asking = [asyncio.create_task(send(client, ask, stream=True)) for _ in range(6)]
            await asyncio.wait(asking, timeout=0.7)
            assert not any(task.done() for task in asking)
            os.kill(gang[0].pid, signal.SIGSTOP)
            await asyncio.to_thread(gang[1].child.wait, SECONDS_TO_NOTICE + SECONDS_TO_END)
            cluster.forget(gang[1])
            os.kill(gang[0].pid, signal.SIGCONT)
            await asyncio.to_thread(gang[0].child.wait, SECONDS_TO_END)
            cluster.forget(gang[0])
            for task in asking:
                task.cancel()
    finally:
        for running in gang:
            if running.child.wait(0) is None:
                os.kill(running.pid, signal.SIGCONT)
        cluster.close()
