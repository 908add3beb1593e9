"""Several replicas: memory that is short, layouts that differ, processes that are killed or leave, IPv6."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from slipstream.rpc.channel import connect
from slipstream.types import FinishReason
from slipstream.v1 import worker_pb2 as pb
from tests.support.cluster import Cluster
from tests.support.worker_client import Pair, Prompt, Worker, pair

LEASE_SECONDS = 2.0
SHORT = Prompt(tokens=range(40, 60), max_tokens=12, ignore_eos=True)
SLOW = Prompt(tokens=[20 + i % 180 for i in range(900)], max_tokens=4, ignore_eos=True, fresh=True)
"""Takes seconds on the way, on the fastest machine: the link is slow."""
SLOW_LINK = ["transfer.faults.bytes_per_second=800e3", f"transfer.lease_seconds={LEASE_SECONDS}"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """decode-0 is like prefill-0, decode-1 has little memory, decode-2 other blocks; prefill-1 has a slow link."""
    cluster = Cluster(tmp_path_factory.mktemp("replicas"))
    little = ["engine.kv_cache_tokens=256", "engine.max_running=3"]
    small_steps = ["engine.prefill_chunk_tokens=4", f"transfer.lease_seconds={LEASE_SECONDS}"]
    cluster.start_each(("prefill", small_steps), ("decode", []), ("decode", little), ("decode", ["engine.block_size=8"]),
                       ("prefill", SLOW_LINK))
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints, "a failed request is no fault of the process"


@pytest.fixture
async def both(cluster: Cluster) -> AsyncIterator[Pair]:
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as both:
        yield both
        await both.until_empty()


@pytest.fixture
async def slow(cluster: Cluster) -> AsyncIterator[Pair]:
    async with pair(cluster.processes["prefill-1"].address, cluster.processes["decode-0"].address) as slow:
        yield slow
        await slow.until_empty()


async def start(both: Pair, *prompts: Prompt) -> list[pb.Submit]:
    """Both legs of each run when this returns, and the destination holds memory for all; what prefill was sent."""
    left = both.decode.load.free_blocks - sum(len(prompt.tokens) // both.decode.info.block_size for prompt in prompts)
    sent = [await both.submits(prompt) for prompt in prompts]
    for to_prefill, to_decode in sent:
        await both.prefill.submit(to_prefill)
        await both.decode.submit(to_decode)
    await both.decode.until(lambda: both.decode.load.free_blocks <= left)
    return [to_prefill for to_prefill, _ in sent]


# Busy -----------------------------------------------------------------------------------------------------------------


async def test_busy_keeps_the_work_and_everybody_finishes_right(cluster: Cluster, both: Pair) -> None:
    prompts = [Prompt(tokens=range(30 + i, 50 + i + 7 * (i % 5)), max_tokens=16 + 9 * (i % 4), ignore_eos=True)
               for i in range(10)]
    prompts[3] = Prompt(tokens=range(30, 180), max_tokens=100, ignore_eos=True)  # needs all of the small replica's memory
    right = [answer.tokens for answer in await asyncio.gather(*(both.ask(prompt) for prompt in prompts))]
    async with pair(both.prefill.address, cluster.processes["decode-1"].address) as small:
        answers = await asyncio.gather(*(small.ask(prompt) for prompt in prompts))
        assert [answer.tokens for answer in answers] == right
        assert sum(answer.busy for answer in answers) > 0, "it was never busy: the test shows nothing"
        await small.until_empty()


async def test_a_request_that_never_fits_is_refused_for_good(cluster: Cluster, both: Pair) -> None:
    async with pair(both.prefill.address, cluster.processes["decode-1"].address) as small:
        to_prefill, to_decode = await small.submits(Prompt(tokens=range(30, 60), max_tokens=1000))
        one, other = await small.prefill.submit(to_prefill), await small.decode.submit(to_decode)
        failed = await other.failed(5)
        assert failed.code == pb.ERROR_CODE_CONTEXT_LENGTH
        assert "max_tokens" in failed.message
        await small.prefill.cancel(to_prefill.handle)
        await one.failed(5)


async def test_other_block_sizes_never_pair(cluster: Cluster, both: Pair) -> None:
    async with pair(both.prefill.address, cluster.processes["decode-2"].address) as odd:
        assert odd.decode.info.compatibility_hash != odd.prefill.info.compatibility_hash
        assert "grpc" in set(odd.decode.info.channels) & set(odd.prefill.info.channels)
        to_prefill, to_decode = await odd.submits(SHORT)
        one, leg = await odd.prefill.submit(to_prefill), await odd.decode.submit(to_decode)
        failed = await leg.failed(5)
        assert failed.code == pb.ERROR_CODE_INCOMPATIBLE
        assert "block_size: ours 8, theirs 16" in failed.message
        await odd.prefill.cancel(to_prefill.handle)
        await one.failed(5)


# Killed processes -----------------------------------------------------------------------------------------------------


async def test_a_killed_decode_replica(cluster: Cluster, slow: Pair) -> None:
    (victim,) = cluster.start_workers("decode")
    right = await slow.ask(SLOW)
    async with pair(slow.prefill.address, victim.address) as doomed:
        kept, lost = await start(doomed, SLOW, SLOW)
        kept_leg = doomed.prefill.leg(kept.handle)
        lost_leg = doomed.prefill.leg(lost.handle)
        cluster.kill(victim)
        assert doomed.decode._reader is not None
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(doomed.decode._reader, 5)
        # The work is kept: another replica takes the same transfer up.
        again = pb.Submit(prefill_addresses=doomed.prefill.info.cache_store_addresses, prefill_epoch=1)
        again.MergeFrom(kept)
        again.attempt = 1
        leg = await slow.decode.submit(again)
        await leg.finished(30)
        assert kept_leg.tokens | leg.tokens == dict(enumerate(right.tokens))
        assert (await kept_leg.finished(5)).handed_off
        assert (await lost_leg.failed(LEASE_SECONDS + 5)).code == pb.ERROR_CODE_LEASE_EXPIRED


async def test_a_killed_prefill_replica(cluster: Cluster, both: Pair) -> None:
    right = (await both.ask(SHORT)).tokens
    (victim,) = cluster.start_workers("prefill", overrides=SLOW_LINK)
    async with pair(victim.address, both.decode.address) as doomed:
        (sent,) = await start(doomed, SLOW)
        leg = doomed.decode.leg(sent.handle)
        cluster.kill(victim)
        assert (await leg.failed(3)).code == pb.ERROR_CODE_UNAVAILABLE
        await doomed.decode.until_empty(5)
    assert (await both.ask(SHORT)).tokens == right


# Drain ----------------------------------------------------------------------------------------------------------------


async def health(address: str) -> int:
    async with connect(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return int(reply.status)


async def test_drain_lets_requests_end_and_takes_no_new_ones(cluster: Cluster, both: Pair) -> None:
    leaving = cluster.start_workers("decode")[0]
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await health(leaving.address) == serving
    async with pair(both.prefill.address, leaving.address) as last:
        to_prefill, to_decode = await last.submits(Prompt(tokens=range(40, 60), max_tokens=150, ignore_eos=True))
        await last.prefill.submit(to_prefill)
        leg = await last.decode.submit(to_decode)
        await leg.token(1)
        drained = asyncio.create_task(_drain(last.decode))
        await last.decode.until(lambda: last.decode.load.draining)
        assert await health(leaving.address) == not_serving
        _, refused = await last.submits(SHORT)
        failed = await (await last.decode.submit(refused)).failed(5)
        assert failed.code == pb.ERROR_CODE_UNAVAILABLE
        assert failed.retry_after_ms > 0
        await leg.finished(30)
        assert leg.reasons == {0: FinishReason.LENGTH}
        assert (await drained).unfinished == 0
    assert await asyncio.to_thread(cluster.stop, leaving) == 0


async def _drain(worker: Worker) -> pb.DrainReply:
    reply: pb.DrainReply = await worker.stub.Drain(pb.DrainRequest(timeout_ms=30_000))
    return reply


# Addresses ------------------------------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_ipv6(cluster: Cluster, both: Pair) -> None:
    prefill, decode = cluster.start_each(("prefill", []), ("decode", []), listen="[::1]:0", epoch=7)
    assert prefill.address.startswith("[::1]:")
    async with pair(prefill.address, decode.address) as six:
        assert list(six.prefill.info.cache_store_addresses) == [prefill.address]
        assert six.prefill.info.epoch == 7
        assert (await six.ask(SHORT)).tokens == (await both.ask(SHORT)).tokens
