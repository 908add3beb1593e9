"""Several sends at once: told in order, given up together, and waited for whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cache_transfer.channels.base import Buffer, LostError, UnsettledError
from cache_transfer.pipeline import Pipeline


class Wire:
    """Sends that end when they are told to, and the frames that were written."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.gates: list[asyncio.Future[bytes]] = []
        self.landing = 0

    async def write(self, frame: bytes) -> None:
        self.frames.append(frame)

    async def send(self) -> Sequence[Buffer]:
        """Like a one-sided write: once it has begun, a cancel does not end it."""
        gate: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        self.landing += 1
        cancelled = False
        while not gate.done():
            try:
                await asyncio.wait((gate,))
            except asyncio.CancelledError:
                cancelled = True
        self.landing -= 1
        if cancelled and gate.exception() is None:
            raise asyncio.CancelledError
        return [gate.result()]


async def started(wire: Wire, pipeline: Pipeline, count: int) -> asyncio.Task[None]:
    """Something that adds `count` frames."""
    async def add() -> None:
        for number in range(count):
            await pipeline.add(str(number).encode(), wire.send())

    task = asyncio.create_task(add())
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_it_fills_up_to_its_depth_and_tells_in_order() -> None:
    wire = Wire()
    pipeline = Pipeline(3, wire.write, 5)
    task = await started(wire, pipeline, 4)
    assert len(wire.gates) == 3
    wire.gates[2].set_result(b"c")
    wire.gates[1].set_result(b"b")
    await asyncio.sleep(0.01)
    assert not wire.frames, "frame 0 is under way still"
    wire.gates[0].set_result(b"a")
    await asyncio.wait_for(task, 1)
    wire.gates[3].set_result(b"d")
    await asyncio.wait_for(pipeline.drain(), 1)
    assert wire.frames == [b"0a", b"1b", b"2c", b"3d"]
    await pipeline.settle()


async def test_a_depth_of_one_reads_memory_without_a_pause() -> None:
    memory = bytearray(b"before")

    async def send() -> Sequence[Buffer]:
        return [memoryview(memory)]

    wire = Wire()
    asyncio.get_running_loop().call_soon(memory.__setitem__, slice(None), b"after!")
    await Pipeline(1, wire.write, 5).add(b"", send())
    assert wire.frames == [b"before"]


async def test_a_failed_send_does_not_leave_others_behind() -> None:
    wire = Wire()
    pipeline = Pipeline(2, wire.write, 5)
    task = await started(wire, pipeline, 3)
    wire.gates[0].set_exception(LostError("gone"))
    with pytest.raises(LostError, match="gone"):
        await asyncio.wait_for(task, 1)
    settling = asyncio.create_task(pipeline.settle())
    await asyncio.sleep(0.01)
    assert not settling.done(), "the other one may still land"
    wire.gates[1].set_result(b"")
    await asyncio.wait_for(settling, 1)
    assert wire.landing == 0
    assert not wire.frames


async def test_a_send_that_may_still_land_is_what_settle_says() -> None:
    wire = Wire()
    pipeline = Pipeline(2, wire.write, 0.05)
    task = await started(wire, pipeline, 2)
    with pytest.raises(LostError, match=r"stalled: nothing moved for 0\.05 s"):
        await asyncio.wait_for(task, 1)
    for gate in wire.gates:
        gate.set_exception(UnsettledError("a write was not over"))
    with pytest.raises(UnsettledError):
        await asyncio.wait_for(pipeline.settle(), 1)


async def test_settle_survives_a_cancel() -> None:
    wire = Wire()
    pipeline = Pipeline(2, wire.write, 5)
    task = await started(wire, pipeline, 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    settling = asyncio.create_task(pipeline.settle())
    await asyncio.sleep(0)
    settling.cancel()
    await asyncio.sleep(0.01)
    assert not settling.done()
    for gate in wire.gates:
        gate.set_result(b"")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(settling, 1)
    assert wire.landing == 0
