"""Replicas of several ranks that are cut differently: the whole prompt arrives on every rank, or none of them has it."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import grpc.aio
import pytest
import torch

from cache_transfer import frames, plan
from cache_transfer.links import Call
from cache_transfer.load import given
from cache_transfer.regions import Landing
from slipstream.errors import (
    BusyError,
    CancelledError,
    CoverageError,
    IncompatibleError,
    ProtocolError,
    SlipstreamError,
    TransferError,
)
from slipstream.sharding import Geometry
from slipstream.types import AttentionLayer
from slipstream.v1 import cache_store_pb2 as pb
from tests.support import transfer_rig
from tests.support.damage import Damaging
from tests.support.transfer_gang import Decode, Prefill, decode, landed, prefill

LAYOUT = transfer_rig.layout()
TOKENS = 17
AT = Landing(blocks=(9, 3, 40, 17, 5), state_slot=5)
TO = Landing(blocks=(1, 50, 6, 22, 13), state_slot=2)
MARK = -7.0


def cut(tp: int, *stages: int) -> Geometry:
    return Geometry(tp=tp, stages=stages or (4,))


ONE, TP2 = cut(1), cut(2)
PAIRS = [(TP2, cut(1, 2, 2)), (ONE, cut(4)), (cut(1, 1, 2, 1), TP2), (TP2, TP2), (cut(4), ONE), (cut(4, 3, 1), cut(2, 1, 3)),
         (cut(2, 2, 2), cut(4, 1, 1, 2))]


def necessary(geometry: Geometry, rows: int) -> int:
    """Bytes that the ranks of a destination need: 2 linear layers and 2 attention layers in float32; heads of which there are
    fewer than ranks are needed on each of their ranks."""
    twos, fours = max(2, geometry.tp), 4  # key and KV heads; value heads
    conv = (2 * twos * 8 + fours * 8) * 3 * 4
    return 2 * (conv + fours * 8 * 8 * 4) + 2 * rows * 2 * twos * 16 * 4


def check(here: Decode, to: Landing, tokens: int = TOKENS) -> None:
    for rank in here.ranks:
        for name, tensor in landed(LAYOUT, AT, to, tokens, rank.memory.shard, MARK).items():
            assert torch.equal(tensor, rank.held[name]), (rank.memory.shard.rank, name)


async def whole(there: Prefill, here: Decode, name: str = "t", *, attempt: int = 0, to: Landing = TO) -> None:
    """A prompt from its beginning to Done."""
    prompt = there.prompt(name, TOKENS, AT) if attempt == 0 else []
    loads = here.load(there.addresses, name, TOKENS, to, attempt=attempt)
    if prompt:
        await there.compute(prompt, [TOKENS])
    for loaded in await asyncio.gather(*loads):
        await loaded.close(committed=True)
    async with asyncio.timeout(20):
        while there.open_transfers:  # noqa: ASYNC110 - the last Done is on its way
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("have", [0, 8, 16])
@pytest.mark.parametrize(("source", "to"), PAIRS)
async def test_every_rank_gets_its_part_and_no_byte_more_is_sent(source: Geometry, to: Geometry, have: int) -> None:
    where = replace(TO, have_tokens=have)
    async with prefill(source, frame_bytes=1000) as there, decode(to, mark=MARK) as here:
        prompt = there.prompt("t", TOKENS, AT, cached=4)
        loads = here.load(there.addresses, "t", TOKENS, where)
        await there.compute(prompt, [9, 10, TOKENS])
        done = await asyncio.gather(*loads)
        check(here, where)
        assert sum(loaded.kv_bytes + loaded.state_bytes for loaded in done) == necessary(to, TOKENS - have)
        assert sum(sum(rank.channel.payloads) for rank in here.ranks) == necessary(to, TOKENS - have)
        assert [loaded.handed is not None for loaded in done] == [True] + [False] * (to.world - 1)
        assert done[0].handoff.choices[0].first_token == 7
        for number, loaded in enumerate(done):
            for site, (transfer, _) in zip(there.sites, prompt, strict=True):
                assert not (transfer.over and number in plan.readers(LAYOUT, site.shard, to)), "a reader is not done"
            await loaded.close(committed=True)
        for site, (transfer, log) in zip(there.sites, prompt, strict=True):
            if plan.readers(LAYOUT, site.shard, to):
                await log.until("ready", "done")
            else:  # its part is replicated on another rank: nobody reads it here
                assert log.heard == []
                transfer.close()
        assert there.open_transfers == 0


async def test_a_prompt_finished_by_its_first_token_ends_on_every_rank() -> None:
    async with prefill(TP2) as there, decode(cut(1, 2, 2)) as here:
        prompt = there.prompt("t", TOKENS, AT)
        loads = here.load(there.addresses, "t", TOKENS, TO)
        await there.compute(prompt, [TOKENS], finished=True)
        for loaded in await asyncio.gather(*loads):
            await loaded.close(committed=False)
        for _, log in prompt:
            await log.until("ready", "done, not committed")


async def test_a_destination_whose_rank_0_does_not_commit_waits_for_nobody() -> None:
    async with prefill(ONE) as there, decode(TP2) as here:
        (_, log), = prompt = there.prompt("t", TOKENS, AT)
        await there.compute(prompt, [TOKENS])
        await (await here.one(0, there.addresses, "t", given(TO, TOKENS))).close(committed=False)
        await log.until("done, not committed")
        with pytest.raises(TransferError, match="is over"):
            await here.one(1, there.addresses, "t", given(TO, TOKENS))


async def test_a_rank_that_nobody_reads_from_is_closed_by_its_rank_0() -> None:
    layout = replace(LAYOUT, layers=(AttentionLayer(name="layers.0", kv_heads=2, head_size=16),))
    async with prefill(cut(4, 1), layout) as there, decode(cut(1, 1), layout) as here:
        prompt = there.prompt("t", TOKENS, AT)
        loads = here.load(there.addresses, "t", TOKENS, TO)
        await there.compute(prompt, [TOKENS])
        await (await loads[0]).close(committed=True)
        for rank in (0, 2):
            await prompt[rank][1].until("ready", "done")
        for transfer, log in prompt:
            transfer.close()
            transfer.close()
            assert log.heard in (["done"], ["ready", "done"])
        assert there.open_transfers == 0


async def test_only_rank_0_lets_a_lease_run_out_and_it_runs_until_the_other_rank_0_comes() -> None:
    async with prefill(TP2, lease_seconds=0.2) as there, decode(ONE, mark=MARK) as here:
        prompt = there.prompt("t", TOKENS, AT)
        await prompt[0][1].until("failed")
        assert prompt[1][1].heard == []
        prompt[1][0].fail(CancelledError("rank 0 said so"))
        await whole(there, here, "u")


async def test_a_destination_that_is_busy_parks_the_prompt_and_another_geometry_takes_over() -> None:
    async with prefill(TP2) as there, decode(ONE) as small, decode(cut(4), mark=MARK) as here:
        prompt = there.prompt("t", TOKENS, AT)
        await there.compute(prompt, [TOKENS])

        async def no(num_tokens: int) -> None:
            return None

        with pytest.raises(BusyError):
            await small.one(0, there.addresses, "t", no)
        await prompt[0][1].until("parked: the destination is busy: no memory for the prompt and its output")
        assert "ready" not in prompt[1][1].heard
        await whole(there, here, attempt=1)
        check(here, TO)


async def test_cancelling_one_destination_rank_parks_what_it_reads_and_ends_the_other_s_streams() -> None:
    async with prefill(TP2) as there, decode(cut(1, 2, 2), mark=MARK) as here:
        prompt = there.prompt("t", TOKENS, AT)
        loads = here.load(there.addresses, "t", TOKENS, TO)
        for _, log in prompt:
            await log.until("ready")
        await there.compute(prompt, [4, 5])  # both loads are on their way: 12 rows are missing
        loads[1].cancel()
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert isinstance(results[0], TransferError)
        assert isinstance(results[1], asyncio.CancelledError)
        for _, log in prompt:
            await log.until("ready", "parked: the destination was lost")
        before = [{name: tensor.clone() for name, tensor in rank.held.items()} for rank in here.ranks]
        await there.compute(prompt, [TOKENS])
        async with decode(ONE, mark=MARK) as other:
            await whole(there, other, attempt=1)
            check(other, TO)
        assert all(torch.equal(tensor, rank.held[name]) for rank, then in zip(here.ranks, before, strict=True)
                   for name, tensor in then.items()), "nothing is written after a load has ended"


async def test_a_higher_attempt_of_any_rank_supersedes_all_streams_of_the_lower_one() -> None:
    async with prefill(ONE) as there, decode(TP2) as old, decode(TP2, mark=MARK) as here, decode(ONE) as late:
        prompt = there.prompt("t", TOKENS, AT)
        log = prompt[0][1]
        first = old.load(there.addresses, "t", TOKENS, TO)
        await log.until("ready")
        with pytest.raises(ProtocolError, match="too late"):
            await here.one(1, there.addresses, "t", given(TO, TOKENS))
        follower = asyncio.create_task(here.one(1, there.addresses, "t", given(TO, TOKENS), attempt=1))  # before its rank 0
        for error in await asyncio.gather(*first, return_exceptions=True):
            assert isinstance(error, TransferError)
        for whose, attempt, says in ((late, 1, "comes from"), (old, 0, "too late")):
            with pytest.raises(ProtocolError, match=says):
                await whose.one(0, there.addresses, "t", given(TO, TOKENS), attempt=attempt)
        leader = asyncio.create_task(here.one(0, there.addresses, "t", given(TO, TOKENS), attempt=1))
        await log.until("ready", "ready")
        await there.compute(prompt, [TOKENS])
        for number, load in enumerate((leader, follower)):
            await (await load).close(committed=number == 0)
        await log.until("ready", "ready", "done, not committed")
        check(here, TO)


@pytest.mark.parametrize("broken", [0, 1])
async def test_damage_by_one_source_rank_fails_the_whole_load(broken: int) -> None:
    damaged = Damaging()
    async with prefill(TP2, channels={broken: damaged}) as there, decode(ONE) as here:
        prompt = there.prompt("t", TOKENS, AT)
        loads = here.load(there.addresses, "t", TOKENS, TO)
        for _, log in prompt:
            await log.until("ready")
        await there.compute(prompt, [TOKENS])
        with pytest.raises(CoverageError, match="checksum"):
            await loads[0]
        await prompt[broken][1].until("ready", "failed")
        await prompt[1 - broken][1].until("ready", "parked: the destination was lost")


@pytest.mark.parametrize("rank", [0, 1])
async def test_why_one_source_rank_gave_up_is_what_the_load_raises(rank: int) -> None:
    async with prefill(TP2) as there, decode(ONE) as here:
        prompt = there.prompt("t", TOKENS, AT)
        loads = here.load(there.addresses, "t", TOKENS, TO)
        for _, log in prompt:
            await log.until("ready")
        prompt[rank][0].fail(CancelledError("the client went away"))
        with pytest.raises(CancelledError, match="the client went away"):
            await loads[0]


async def test_a_follower_refuses_a_prompt_of_another_length() -> None:
    async with prefill(ONE) as there, decode(TP2) as here:
        there.prompt("t", TOKENS, AT)
        with pytest.raises(ProtocolError, match="sends 17 tokens; rank 0 was told 16"):
            await here.one(1, there.addresses, "t", given(TO, 16))


async def test_source_ranks_that_disagree_about_the_prompt_are_refused() -> None:
    async with prefill(TP2) as there, decode(ONE) as here:
        there.sites[0].prompt("t", TOKENS, where=AT)
        there.sites[1].prompt("t", 16, where=AT)
        with pytest.raises(ProtocolError, match="17 and 16 tokens of one prompt"):
            await here.load(there.addresses, "t", TOKENS, TO)[0]


async def test_ranks_and_geometries_that_do_not_fit_are_named() -> None:
    async with prefill(TP2) as there, decode(ONE) as here:
        there.prompt("t", TOKENS, AT)
        for addresses, says in (([], "no address"), (there.addresses[:1], r"1 addresses .* are given; it is Geometry\(tp=2"),
                                ([there.addresses[0]] * 2, r"rank 0 of .*, not rank 1 of"),
                                (there.addresses[::-1], r"rank [01] of .*, not rank [01] of")):
            with pytest.raises(IncompatibleError, match=says):
                await here.load(addresses, "t", TOKENS, TO)[0]
        for geometry, rank, says in ((cut(3), 0, "tp 3 does not cut"), (cut(2, 2, 1), 0, "are not the model's 4 layers"),
                                     (TP2, 2, "no rank 2"), (cut(1, 2, 2), 5, "no rank 5"), (TP2, 1, "nothing to read")):
            told = pb.HelloRequest(replica_id="d", rank=rank, geometry=frames.geometry_to_pb(geometry),
                                   layout=pb.Layout(fields=LAYOUT.fields()))
            opened = pb.Open(transfer_id="t", epoch=1, request_id="r", compatibility_hash=LAYOUT.hash, remaining_ms=5000,
                             channel="grpc", geometry=told.geometry, rank=rank)
            async with grpc.aio.insecure_channel(there.addresses[0]) as channel:
                hello: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{frames.SERVICE}/Hello")
                reply = pb.HelloReply.FromString(await hello(told.SerializeToString()))
                call: Call = channel.stream_stream(f"/{frames.SERVICE}/Transfer")()
                await call.write(frames.control(open=opened))
                answer = frames.parse(await call.read())  # type: ignore[arg-type]
            assert isinstance(answer, pb.Control)
            assert answer.failed.code == "incompatible"
            assert says in answer.failed.message
            assert says in reply.reason or says == "nothing to read"
            assert (reply.rank, frames.geometry_from_pb(reply, 4)) == (0, TP2)


async def one(there: Prefill, here: Decode, name: str, rng: random.Random) -> set[str]:
    """A request that any rank of either side may leave at any moment; its owners clean up as the ranks 0 would."""
    prompt = there.prompt(name, TOKENS, AT)
    loads = here.load(there.addresses, name, TOKENS, TO)
    transfer, _ = rng.choice(prompt)
    leaves: list[Callable[[], object]] = [rng.choice(loads).cancel, lambda: transfer.fail(CancelledError("gone")), lambda: None]
    leaver = asyncio.get_running_loop().call_later(rng.random() * 0.05, rng.choice(leaves))
    await there.compute(prompt, [rng.randrange(1, TOKENS), TOKENS])
    waiting = set(loads)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if any(load.cancelled() or load.exception() for load in done):
            for load in waiting:
                load.cancel()
    results = await asyncio.gather(*loads, return_exceptions=True)
    leaver.cancel()
    for loaded in results:
        if not isinstance(loaded, BaseException):
            await loaded.close(committed=True)
    for transfer, log in prompt:
        transfer.fail(CancelledError("its owner cleans up"))
        assert [event in ("done", "failed") for event in log.heard].count(True) == 1, log.heard
    return {result.code if isinstance(result, SlipstreamError) else type(result).__name__ for result in results}


@pytest.mark.parametrize(("source", "to"), [(TP2, cut(1, 2, 2)), (cut(1, 2, 2), TP2)])
async def test_a_hundred_requests_that_any_rank_leaves_at_any_moment_leave_nothing(source: Geometry, to: Geometry) -> None:
    rng = random.Random(7)
    async with prefill(source, frame_bytes=1000) as there, decode(to, mark=MARK) as here:
        await whole(there, here, "first")
        before = len(asyncio.all_tasks())
        endings = await asyncio.gather(*(one(there, here, f"t{number}", rng) for number in range(100)))
        assert {"Loaded"} in endings
        assert {"CancelledError"} & set().union(*endings)
        assert there.open_transfers == 0
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - streams that were cut off end by themselves
                await asyncio.sleep(0.01)
        for rank in here.ranks:
            for tensor in rank.held.values():
                tensor.fill_(MARK)
        await whole(there, here, "last")
        check(here, TO)


# Ranks that die ------------------------------------------------------------------------------------------------------


async def test_a_source_rank_that_is_killed_ends_the_load_and_parks_the_prompt_on_the_other() -> None:
    async with AsyncExitStack() as stack:
        there = [await stack.enter_async_context(transfer_rig.source(tp=2, stages=[4], rank=rank)) for rank in (0, 1)]
        here = await stack.enter_async_context(decode(ONE))
        prompt = {"tokens": TOKENS, "blocks": AT.blocks, "slot": AT.state_slot}
        for source in there:
            await source.tell(expect="t", tokens=TOKENS, hold=True)
        loads = here.load([source.address for source in there], "t", TOKENS, TO)
        await there[0].tell(compute="t", **prompt)
        await there[1].tell(compute="t", begin=True, **prompt)
        for source in there:
            await source.hear("ready")
        async with asyncio.timeout(20):
            await here.ranks[0].channel.landed.wait()
        there[1].process.kill()
        with pytest.raises(TransferError, match="broke"):
            await asyncio.wait_for(loads[0], 5)
        await there[0].hear("parked")


async def test_a_destination_rank_that_is_killed_ends_the_other_and_parks_the_prompt_for_the_next() -> None:
    tokens = 40_000  # more than the sockets take of a rank that is stopped
    at, to = (Landing(blocks=tuple(range(64)) * (tokens // 256 + 1), state_slot=slot) for slot in (5, 2))
    async with prefill(ONE) as there, decode(TP2) as here, decode(TP2) as other:
        (transfer, log), = prompt = there.prompt("t", tokens, at)
        arguments = {"address": there.addresses[0], "name": "t", "blocks": to.blocks, "slot": to.state_slot,
                     "tp": 2, "stages": [4], "rank": 1}
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.support.transfer_destination",
                                                       json.dumps(arguments), stderr=asyncio.subprocess.DEVNULL)
        try:
            leader = here.load(there.addresses, "t", tokens, to)
            leader[1].cancel()
            await log.until("ready")
            process.send_signal(signal.SIGSTOP)  # it can't have finished before it dies
            await there.compute(prompt, [tokens])
            process.kill()
            with pytest.raises(TransferError):
                await asyncio.wait_for(leader[0], 5)
            await log.until("ready", "parked: the destination was lost")
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        for loaded in await asyncio.gather(*other.load(there.addresses, "t", tokens, to, attempt=1)):
            await loaded.close(committed=True)
        await log.until("ready", "parked: the destination was lost", "ready", "done")
        assert transfer.over


@pytest.mark.parametrize(("source", "to"), PAIRS)
async def test_what_is_cached_whole_is_final_on_every_rank_without_a_step(source: Geometry, to: Geometry) -> None:
    async with prefill(source, frame_bytes=1000) as there, decode(to, mark=MARK) as here:
        prompt = there.prompt("t", 16, AT, cached=16)
        loads = here.load(there.addresses, "t", 16, TO)
        await there.compute(prompt, [16], layers=False)
        for loaded in await asyncio.gather(*loads):
            await loaded.close(committed=True)
        check(here, TO, 16)
