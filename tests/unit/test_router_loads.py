"""One load from decode to prefill as the router sees it: what it submits, how it ends, who is told that it is over."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from router.link import LegSink, WorkerLink
from router.turns import BUSY, CANCELLED, FAILED, GONE, LATE, LOADED, CacheLoad
from slipstream.errors import BusyError, SlipstreamError, TransferError, UnavailableError
from slipstream.v1 import worker_pb2 as pb


class Link:
    """Keeps what it is told."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.is_there = is_there
        self.submitted: list[pb.Submit] = []
        self.cancelled: list[int] = []
        self.sink: Any = None
        self.asked = asyncio.Event()

    def connected(self) -> pb.WorkerInfo:
        if not self.is_there:
            raise UnavailableError("not connected")
        return pb.WorkerInfo(cache_store_addresses=["a:1", "b:2"], epoch=5)

    def submit(self, message: pb.Submit, sink: LegSink) -> None:
        self.connected()
        self.submitted.append(message)
        self.sink = sink
        self.asked.set()

    def cancel(self, handle: int, attempt: int) -> None:
        self.cancelled.append(handle)


class Rig:
    def __init__(self, seconds: float = 20, *, target_there: bool = True) -> None:
        self.source, self.target = Link(), Link(is_there=target_there)
        prompt = pb.Submit(request_id="r~2", tokens=[1, 2, 3], output=[4], cache_salt="s",
                           images=[pb.Image(content_hash=b"x" * 16)])
        self.load = CacheLoad(prompt, 7, cast(WorkerLink, self.source), cast(WorkerLink, self.target), seconds)

    async def begin(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.load.run())
        await asyncio.wait_for(self.target.asked.wait(), 5)
        return task

    @property
    def cancelled(self) -> list[list[int]]:
        return [self.source.cancelled, self.target.cancelled]


def finished(tokens: int = 0) -> pb.Finished:
    return pb.Finished(handle=7, stats=pb.LegStats(cached_tokens=tokens))


@pytest.mark.parametrize("lender_first", [True, False])
async def test_both_sides_are_asked_for_the_prompt_and_nothing_is_cancelled_that_ends_well(lender_first: bool) -> None:
    rig = Rig()
    task = await rig.begin()
    (lends,), (takes,) = rig.source.submitted, rig.target.submitted
    assert lends.cached
    assert (lends.handle, lends.request_id, lends.cache_salt, lends.remaining_ms) == (7, "r~2~load", "s", 20_000)
    assert (list(lends.tokens), list(lends.output), len(lends.images)) == ([1, 2, 3], [4], 1)
    assert not lends.prefill_addresses
    assert (list(takes.prefill_addresses), takes.prefill_epoch) == (["a:1", "b:2"], 5)
    takes.ClearField("prefill_addresses")
    takes.ClearField("prefill_epoch")
    assert takes == lends
    assert len(lends.transfer_id) > 32, "nobody guesses it"
    for side in (rig.source, rig.target) if lender_first else (rig.target, rig.source):
        side.sink.on_finished(finished(48 if side is rig.target else 0))
    await asyncio.wait_for(task, 5)
    assert (rig.load.outcome.outcome, rig.load.outcome.stats.cached_tokens) == (LOADED, 48)
    assert rig.cancelled == [[], []]


@pytest.mark.parametrize(("by", "error", "outcome"), [
    ("source", UnavailableError("nothing is cached"), GONE), ("target", BusyError("no room"), BUSY),
    ("target", TransferError("it broke"), FAILED)])
async def test_what_fails_ends_it_at_once_and_both_sides_are_told(by: str, error: SlipstreamError, outcome: str) -> None:
    rig = Rig()
    task = await rig.begin()
    getattr(rig, by).sink.on_failed(0, error)
    await asyncio.wait_for(task, 5)
    assert rig.load.outcome.outcome == outcome
    assert error.message in rig.load.outcome.message
    assert rig.cancelled == [[7], [7]]


async def test_one_that_prefill_has_is_loaded_whatever_becomes_of_the_lender() -> None:
    rig = Rig()
    task = await rig.begin()
    rig.target.sink.on_finished(finished(16))
    rig.source.sink.on_failed(0, UnavailableError("lost"))
    await asyncio.wait_for(task, 5)
    assert rig.load.outcome.outcome == LOADED


async def test_a_late_one_and_one_whose_request_ends_are_cancelled_on_both_sides() -> None:
    rig = Rig(seconds=0.01)
    await asyncio.wait_for(rig.load.run(), 5)
    assert rig.load.outcome.outcome == LATE
    assert rig.cancelled == [[7], [7]]
    rig = Rig()
    task = await rig.begin()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert rig.load.outcome.outcome == CANCELLED
    assert rig.cancelled == [[7], [7]]


async def test_one_that_cannot_be_submitted_has_failed() -> None:
    rig = Rig(target_there=False)
    await asyncio.wait_for(rig.load.run(), 5)
    assert rig.load.outcome.outcome == FAILED
    assert rig.source.cancelled == [7]
