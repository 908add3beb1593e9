"""One side of a transfer stops, dies, hangs or has a bug: the other side's request ends in time, and nobody else's does."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
import torch

from cache_transfer.channels.base import Buffer
from cache_transfer.channels.grpc import InlineChannel
from cache_transfer.spans import Spans
from slipstream.errors import CancelledError, ContextLengthError, DeadlineError, SlipstreamError, TransferError
from slipstream.rpc.server import listen
from tests.support import transfer_rig
from tests.support.complaints import complaints
from tests.support.transfer_site import PATIENCE_SECONDS, PLACE, TOKENS, CountingChannel, Site, destination, serving


class BrokenChannel(InlineChannel):
    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        raise ValueError("a bug")


@asynccontextmanager
async def another_process(address: str, name: str, seconds: float = 60.0) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = {"address": address, "name": name, "blocks": PLACE.blocks, "slot": PLACE.state_slot, "seconds": seconds}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.support.transfer_destination",
                                                   json.dumps(arguments), stderr=asyncio.subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_failing_frees_the_memory_at_once_although_the_destination_is_stopped() -> None:
    channel = CountingChannel()
    async with serving(channel) as site:
        transfer, log = site.prompt("t")
        async with another_process(site.address, "t") as process:
            await log.until("ready")
            process.send_signal(signal.SIGSTOP)
            site.compute(transfer, layers=3)
            await asyncio.wait_for(channel.sending.wait(), PATIENCE_SECONDS)
            transfer.fail(CancelledError("the client went away"))
            assert log.heard == ["ready", "failed"]
            assert site.store.open_transfers == 0
            seen = channel.packed
            process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await process.wait() == 1  # it was told, or cut off
            assert channel.packed == seen


async def test_a_higher_attempt_takes_over_from_a_stopped_destination() -> None:
    async with serving() as site, destination(site.address) as here:
        transfer, log = site.prompt("t")
        async with another_process(site.address, "t") as process:
            await log.until("ready")
            process.send_signal(signal.SIGSTOP)
            site.compute(transfer)
            loaded = await here.load("t", attempt=1)
            assert (loaded.kv_bytes, loaded.state_bytes) == here.layout.bytes_necessary(TOKENS)
            await loaded.close(committed=True)
            await log.until("ready", "ready", "done")
            process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await process.wait() == 1


async def test_a_deadline_in_the_middle_of_a_write_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC takes no second write while one waits for a destination that reads nothing: its last word is left out."""
    async with serving(CountingChannel()) as site:
        transfer, log = site.prompt("t")
        async with another_process(site.address, "t", seconds=2.0) as process:
            await log.until("ready")
            process.send_signal(signal.SIGSTOP)
            site.compute(transfer)
            await log.until("ready", "failed")
            assert isinstance(transfer.error, DeadlineError)
            process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await process.wait() == 1
    assert not complaints(caplog, logging.ERROR)


@pytest.mark.parametrize("layers", [0, 2, 4])
async def test_a_killed_destination_parks_the_prompt_for_another(layers: int) -> None:
    async with serving() as site, destination(site.address) as here:
        transfer, log = site.prompt("t")
        async with another_process(site.address, "t") as process:
            await log.until("ready")
            process.send_signal(signal.SIGSTOP)  # it can't have finished before it dies
            site.compute(transfer, layers=layers)
            process.kill()
            await log.until("ready", "parked: the destination was lost")
        site.compute(transfer)
        await (await here.load("t", attempt=1)).close(committed=True)
        await log.until("ready", "parked: the destination was lost", "ready", "done")


async def test_a_bug_on_the_source_fails_both_sides_of_one_transfer() -> None:
    async with serving(BrokenChannel()) as site, destination(site.address) as here:
        transfer, log = site.prompt("t")
        site.compute(transfer)
        with pytest.raises(SlipstreamError, match="a bug"):
            await here.load("t")
        await log.until("ready", "failed")
        assert log.error is not None
        assert log.error.code == "internal"


async def test_blocks_outside_the_pool_are_never_read() -> None:
    async with serving() as site, destination(site.address) as here:
        transfer, log = site.prompt("t", 4)
        transfer.allocated((transfer_rig.BLOCKS,), 3, 0)
        site.compute(transfer, 4)
        with pytest.raises(SlipstreamError, match=f"block {transfer_rig.BLOCKS} of a pool of {transfer_rig.BLOCKS}"):
            await here.load("t")
        await log.until("ready", "failed")


async def test_what_the_destination_refuses_for_is_told_to_the_source() -> None:
    async with serving() as site, destination(site.address) as here:
        _, log = site.prompt("t")
        with pytest.raises(ContextLengthError):
            await here.load("t", refusal=ContextLengthError("too long for this replica"))
        await log.until("failed")
        assert isinstance(log.error, ContextLengthError)


async def test_an_admission_that_hangs_ends_with_the_deadline() -> None:
    async with serving() as site, destination(site.address) as here:
        site.prompt("t")
        began = time.monotonic()
        with pytest.raises(DeadlineError):
            await here.load("t", seconds=0.5, hang=True)
        assert time.monotonic() - began < 2


async def test_a_stopped_source_holds_up_neither_a_deadline_nor_a_cancel() -> None:
    async with transfer_rig.source() as source, destination(source.address) as here:
        for name in ("t", "v"):
            await source.tell(expect=name, tokens=17, hold=True)
            await source.hear("expected")
        await source.tell(expect="u", tokens=4, blocks=[1], slot=1)
        await (await here.load("u")).close(committed=True)  # greeted: now only Transfer itself waits
        cancelled = asyncio.create_task(here.load("v"))
        await source.tell(compute="v", tokens=17, blocks=[1, 2, 3, 4, 5], slot=1, chunks=[9])
        await asyncio.wait_for(here.channel.landed.wait(), PATIENCE_SECONDS)
        source.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(DeadlineError):
            await here.load("t", seconds=0.5)
        assert time.monotonic() - began < 2
        held = {name: tensor.clone() for name, tensor in here.held.items()}
        source.process.send_signal(signal.SIGCONT)
        await source.tell(compute="v", tokens=17, blocks=[1, 2, 3, 4, 5], slot=1)  # late, for nobody
        await source.tell(state=True)
        await source.hear("state")
        assert all(torch.equal(tensor, here.held[name]) for name, tensor in held.items())


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("connect_seconds", "seconds", "kind"), [(0.3, 20.0, TransferError), (20.0, 0.3, DeadlineError)])
async def test_a_peer_that_never_says_hello(connect_seconds: float, seconds: float, kind: type[SlipstreamError],
                                            resets: bool) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not resets:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, destination(f"127.0.0.1:{port}", connect_seconds) as here:
        began = time.monotonic()
        with pytest.raises(kind):
            await here.load("t", seconds=seconds)
        assert time.monotonic() - began < 2


async def test_many_loads_from_one_source_share_one_hello() -> None:
    hellos = 0

    class Count(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
            nonlocal hellos
            hellos += details.method.endswith("/Hello")
            return await continuation(details)

    site = Site(CountingChannel())
    site.server = grpc.aio.server(interceptors=[Count()])
    site.store.add_to(site.server)
    address = await listen(site.server, "127.0.0.1:0")
    async with destination(address) as here:
        for i in range(20):
            site.compute(site.prompt(f"t{i}", 9)[0], 9)
        for loaded in await asyncio.gather(*(here.load(f"t{i}") for i in range(20))):
            await loaded.close(committed=True)
    assert hellos == 1
    await site.server.stop(None)


async def test_a_source_that_shuts_down_is_a_lost_link_and_not_our_own_cancellation() -> None:
    async with serving() as site, destination(site.address) as here:
        transfer, _ = site.prompt("t")
        site.compute(transfer, layers=3)
        load = asyncio.create_task(here.load("t"))
        await asyncio.wait_for(here.channel.landed.wait(), PATIENCE_SECONDS)
        await site.server.stop(None)
        with pytest.raises(TransferError):
            await load
        assert not load.cancelled()
