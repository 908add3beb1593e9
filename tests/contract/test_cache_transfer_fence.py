"""A source that writes by itself and falls silent: the landing is not given back before it cannot be written any more."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from cache_transfer import spans
from cache_transfer.channels.base import UnsettledError
from cache_transfer.channels.engines.nixl import NixlEngine
from cache_transfer.channels.host import Process
from cache_transfer.channels.rdma import RdmaChannel
from cache_transfer.leg import Leg
from cache_transfer.load import CacheLoader, Loaded
from cache_transfer.paths import open_paths
from cache_transfer.record import RECEIVE
from cache_transfer.regions import Landing
from cache_transfer.transfers import Transfers
from slipstream.config import RdmaConfig, TransferConfig
from slipstream.errors import TransferError
from slipstream.rpc.channel import connect
from slipstream.rpc.server import listen, new_server
from tests.support import transfer_rig
from tests.support.transfer_rig import Source

HERE = Landing(blocks=(1, 50, 6, 22, 13), state_slot=2)
PROMPT = {"tokens": 17, "blocks": (9, 3, 40, 17, 5), "slot": 5}
SILENCE_SECONDS = 2.0  # longer than a last word is waited for


@asynccontextmanager
async def pair(quarantine_seconds: float = 0.5) -> AsyncIterator[tuple[Source, CacheLoader]]:
    config = TransferConfig(channel="rdma", rdma=RdmaConfig(engine="nixl", quarantine_seconds=quarantine_seconds))
    memory, _ = transfer_rig.destination(transfer_rig.layout())
    async with transfer_rig.source(transfer={"channel": "rdma", "rdma": {"engine": "nixl"}}) as source:
        loader = CacheLoader(memory, open_paths(config, memory.extent, process="d0"), replica_id="d0", epoch=1, rank=0,
                             config=config)
        yield source, loader
        await loader.close()


async def invited(source: Source, loader: CacheLoader, name: str) -> asyncio.Task[Loaded]:
    """A load whose source may write, and has not begun to."""
    async def admit(num_tokens: int) -> Landing:
        return HERE

    await source.tell(expect=name, **PROMPT, hold=True)
    await source.hear("expected")
    load = asyncio.create_task(loader.load([source.address], transfer_id=name, attempt=0, source_epoch=1, request_id="r",
                                           remaining_seconds=60.0, admit=admit))
    await source.tell(compute=name, **PROMPT, begin=True)
    await source.hear("ready")
    return load


async def ends_cancelled(load: asyncio.Task[Loaded]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(load, 20)


async def test_a_silent_source_on_this_host_keeps_the_landing_until_it_is_dead() -> None:
    async with pair() as (source, loader):
        load = await invited(source, loader, "t")
        source.process.send_signal(signal.SIGSTOP)
        load.cancel()
        done, _ = await asyncio.wait((load,), timeout=SILENCE_SECONDS)
        assert not done, "it may still write"
        load.cancel()
        done, _ = await asyncio.wait((load,), timeout=0.1)
        assert not done, "another cancel changes nothing"
        source.process.kill()
        await ends_cancelled(load)


async def test_a_source_that_wakes_up_says_that_it_has_stopped() -> None:
    async with pair() as (source, loader):
        load = await invited(source, loader, "t")
        source.process.send_signal(signal.SIGSTOP)
        load.cancel()
        done, _ = await asyncio.wait((load,), timeout=SILENCE_SECONDS)
        assert not done
        source.process.send_signal(signal.SIGCONT)
        await ends_cancelled(load)
        await source.hear("parked")


async def test_a_silent_source_on_another_host_loses_its_way_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process says that it runs elsewhere."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    here = Process.here()
    monkeypatch.setattr(Process, "here", lambda: dataclasses.replace(here, boot="another"))
    async with pair() as (source, loader):
        load = await invited(source, loader, "t")
        source.process.send_signal(signal.SIGSTOP)
        load.cancel()
        await ends_cancelled(load)
        source.process.send_signal(signal.SIGCONT)
        await source.hear("parked")
        load = await invited(source, loader, "u")  # by the engine that took the other's place
        await source.tell(compute="u", **PROMPT)
        await (await asyncio.wait_for(load, 20)).close(committed=True)
        assert (await source.hear("done"))["committed"] is True


async def test_a_source_that_is_told_to_leave_says_so_and_nothing_waits() -> None:
    async with pair(quarantine_seconds=60.0) as (source, loader):
        load = await invited(source, loader, "t")
        load.cancel()
        await ends_cancelled(load)
        await source.hear("parked")
        load = await invited(source, loader, "u")
        await source.tell(fail="u")
        with pytest.raises(Exception, match="the client went away"):
            await asyncio.wait_for(load, 20)


class Fence:
    """A channel whose fence fails so often, and is never up, or up after that."""

    name, direct = "fence", True

    def __init__(self, fails: int | None = None) -> None:
        self.fails = fails

    def address(self) -> bytes:
        return b"here"

    async def fence(self, origin: bytes, invited: bytes) -> None:
        if self.fails is None:
            await asyncio.Event().wait()
        elif self.fails:
            self.fails -= 1
            raise TransferError("no new engine")


@asynccontextmanager
async def streaming(source: Callable[[AsyncIterator[bytes], Any], Awaitable[None]], fence: Fence) -> AsyncIterator[Leg]:
    """The destination's end of a stream that this source has been opened by, and may write by itself."""
    server = new_server()
    handler: Any = grpc.stream_stream_rpc_method_handler(source)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Source", {"Transfer": handler}),))
    async with connect(await listen(server, "127.0.0.1:0")) as channel:
        call: Any = channel.stream_stream("/test.Source/Transfer")
        link: Any = SimpleNamespace(way=SimpleNamespace(channel=fence, peer=b"there"), transfer=lambda seconds: call())
        record = Transfers().open(RECEIVE, request_id="r", transfer_id="t", attempt=0, rank=0, peer="p0", peer_rank=0, now=0.0)
        leg = Leg(link, 30, record)
        leg.invited = True
        await leg.write(b"open")
        yield leg
        await leg.end()
    await server.stop(0)


async def test_an_end_in_order_is_heard_behind_frames_that_nobody_read() -> None:
    """The destination failed, and was cancelled while it said so; the source sends what it had begun, then ends."""
    heard, go_on = asyncio.Event(), asyncio.Event()

    async def source(requests: AsyncIterator[bytes], context: Any) -> None:
        assert await anext(requests) == b"open"
        assert await anext(requests) == b"failed"
        heard.set()
        await go_on.wait()
        for _ in range(5):
            await context.write(b"\1" * 1000)

    async with streaming(source, Fence()) as leg:
        parting = asyncio.create_task(leg.part(b"failed"))
        await asyncio.wait_for(heard.wait(), 5)
        parting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await parting
        fenced = asyncio.create_task(leg.fenced("r"))
        await asyncio.sleep(0.05)
        assert not fenced.done(), "the source may still write"
        go_on.set()
        await asyncio.wait_for(fenced, 5)


async def test_a_last_word_after_the_end_does_not_undo_it() -> None:
    """The source has ended before the destination gives up, and left frames that nobody read."""
    ended = asyncio.Event()

    async def source(requests: AsyncIterator[bytes], context: Any) -> None:
        context.add_done_callback(lambda _: ended.set())
        for _ in range(3):
            await context.write(b"\1" * 1000)

    async with streaming(source, Fence()) as leg:
        await leg.read()
        await asyncio.wait_for(ended.wait(), 5)
        await asyncio.sleep(0.1)  # until the end is here
        await asyncio.wait_for(leg.fenced("r"), 5)
        assert leg.over


async def test_a_fence_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_transfer.leg._AGAIN_SECONDS", 0.01)
    monkeypatch.setattr("cache_transfer.leg._HEARD_SECONDS", 0.1)
    fence = Fence(fails=3)

    async def source(requests: AsyncIterator[bytes], context: Any) -> None:
        await asyncio.Event().wait()

    async with streaming(source, fence) as leg:
        await asyncio.wait_for(leg.fenced("r"), 5)
        assert fence.fails == 0


async def test_a_post_that_fails_may_still_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many spans some may be on their way."""
    memory = np.zeros(1 << 16, np.uint8)
    extent = spans.of((spans.address_of(memory), memory.nbytes))
    ends = [RdmaChannel(partial(NixlEngine, host="127.0.0.1", process=name, lands=True), extent, stall_seconds=5,
                        quarantine_seconds=1) for name in ("p", "d")]
    source, to = ends[0], ends[1].address()
    here, there = extent // np.uint64(2), extent
    here[:, 0] = there[:, 0]
    there = here + np.array([here[0, 1], 0], np.uint64)
    await source.send(to, here, there)
    monkeypatch.setattr(source._engine._agent, "transfer", lambda handle: "ERR")  # type: ignore[attr-defined]
    with pytest.raises(UnsettledError):
        await source.send(to, here, there)
    monkeypatch.undo()
    await source.send(to, here, there)
    for end in ends:
        await end.close()
