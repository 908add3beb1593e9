"""A destination's connections: shared, reopened when their source is another process, closed when they are of no use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from cache_transfer import frames
from cache_transfer.channels.grpc import InlineChannel
from cache_transfer.links import Link, Links
from cache_transfer.paths import Paths
from slipstream.errors import IncompatibleError, ProtocolError, TransferError
from slipstream.rpc import channel
from slipstream.rpc.server import listen, new_server
from slipstream.v1 import cache_store_pb2 as pb
from tests.support import transfer_rig
from tests.support.complaints import complaints
from tests.support.transfer_site import destination, serving

LAYOUT = transfer_rig.layout()
HELLO = pb.HelloRequest(replica_id="d0", epoch=1, layout=pb.Layout(hash=LAYOUT.hash, fields=LAYOUT.fields()))


class Sockets:
    """This process's connections since the object was made; both of their ends are in this process."""

    def __init__(self) -> None:
        self._before = 0.0
        self._before = 2 * self.connections

    @property
    def connections(self) -> float:
        found = -self._before
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        return found / 2

    async def until(self, connections: int) -> None:
        async with asyncio.timeout(20):
            while self.connections != connections:  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.01)


@asynccontextmanager
async def linked(**arguments: float) -> AsyncIterator[Links]:
    links = Links(HELLO, LAYOUT, Paths([InlineChannel()]), connect_seconds=5.0, **arguments)  # type: ignore[arg-type]
    try:
        yield links
    finally:
        await links.close()
        assert len(links) == 0


async def test_an_idle_link_is_closed_one_with_a_prompt_is_not_and_the_next_load_opens_another() -> None:
    async with serving() as busy, serving() as idle, destination("", idle_seconds=0.1) as here:
        sockets = Sockets()
        for site, name in ((busy, "t"), (busy, "held"), (busy, "later"), (idle, "t")):
            site.compute(site.prompt(name, 17)[0], 17)
        for site in (busy, idle):
            await (await here.load("t", address=site.address)).close(committed=True)
        loaded = await here.load("held", address=busy.address)  # its source keeps the prompt until it is closed
        await sockets.until(1)
        await (await here.load("later", address=busy.address)).close(committed=True)
        assert sockets.connections == 1
        transfer, log = idle.prompt("again", 17)
        idle.compute(transfer, 17)
        await (await here.load("again", address=idle.address)).close(committed=True)
        await log.until("ready", "done")
        await sockets.until(1)
        assert busy.store.open_transfers == 1
        await loaded.close(committed=True)
        del loaded  # gRPC keeps a connection as long as there is a call object
        await sockets.until(0)
        assert busy.store.open_transfers == 0


async def test_no_more_links_are_kept_idle_than_the_limit_and_those_are_the_last_used() -> None:
    async with AsyncExitStack() as stack:
        sites = [await stack.enter_async_context(serving()) for _ in range(4)]
        links = await stack.enter_async_context(linked(max_idle=2))
        sockets = Sockets()
        kept = dict[int, Link]()
        async with links.use(sites[3].address, 1):  # in use: does not count
            for number in (0, 1, 2, 0):
                async with links.use(sites[number].address, 1) as kept[number]:
                    pass
            await sockets.until(3)
            for number in (2, 0):
                async with links.use(sites[number].address, 1) as link:
                    assert link is kept[number]
            assert len(links) == 3


async def test_a_broken_link_is_given_to_nobody_and_closed_after_its_last_stream() -> None:
    async with serving() as site, linked() as links:
        sockets = Sockets()
        async with links.use(site.address, 1) as first:
            call = first.transfer(20.0)
        with suppress(grpc.aio.AioRpcError):
            async with links.use(site.address, 1) as same:
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        assert same is first
        async with links.use(site.address, 1) as second:
            assert second is not first
        await sockets.until(2)
        await call.write(b"rubbish")  # the stream on the old link is not cut off
        answer = frames.parse(await call.read())  # type: ignore[arg-type]
        assert isinstance(answer, pb.Control)
        assert answer.failed.code == "protocol"
        assert await call.read() is grpc.aio.EOF
        del call  # gRPC keeps a connection as long as there is a call object
        await sockets.until(1)
        async with links.use(site.address, 1) as third:
            assert third is second


async def test_a_restarted_source_gets_a_new_link_and_failed_greetings_leave_none() -> None:
    async with linked() as links:
        async with serving() as site:
            sockets = Sockets()
            async with links.use(site.address, 1):
                pass
            with pytest.raises(TransferError, match="restarted"):
                async with links.use(site.address, 2):
                    pass
            await sockets.until(0)  # who asks for epoch 2 says that epoch 1 is gone
            async with links.use(site.address, 1):
                pass
        async with serving(epoch=2, address=site.address), links.use(site.address, 2):
            await sockets.until(1)


async def test_a_hello_is_shared_and_outlives_the_one_who_asked_first() -> None:
    async with serving() as site, linked() as links:
        async def use() -> None:
            async with links.use(site.address, 1):
                await asyncio.sleep(0)

        users = [asyncio.create_task(use()) for _ in range(5)]
        await asyncio.sleep(0)
        users[0].cancel()
        results = await asyncio.gather(*users, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, *[type(None)] * 4]
        assert len(links) == 1


@pytest.mark.parametrize("change", [{"protocol": "4"}, {"kv_dtype": "bfloat16"}, {"kv_dtype": "float8_e4m3fn"},
                                    {"weights_revision": "w2"}, {"memory_order": "kv[block,k|v,token,head,channel]"}])
async def test_a_destination_of_another_layout_is_refused_and_the_source_serves_on(change: dict[str, str]) -> None:
    (name, theirs), = change.items()
    other = replace(LAYOUT, **change)  # type: ignore[arg-type]
    async with serving() as site, destination(site.address) as here:
        links = Links(pb.HelloRequest(layout=pb.Layout(fields=other.fields())), other, Paths([InlineChannel()]),
                      connect_seconds=5.0)
        with pytest.raises(IncompatibleError) as error:
            async with links.use(site.address, 1):
                pass
        await links.close()
        for word in (name, theirs, getattr(LAYOUT, name)):
            assert word in error.value.message
        site.compute(site.prompt("t", 17)[0], 17)
        await (await here.load("t")).close(committed=True)


async def test_a_hello_of_rubbish_is_refused_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as site, destination(site.address) as here:
        async with grpc.aio.insecure_channel(site.address) as channel:
            hello: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{frames.SERVICE}/Hello")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await hello(b"\xff\xff")
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no HelloRequest" in str(error.value.details())
        site.compute(site.prompt("t", 17)[0], 17)
        await (await here.load("t")).close(committed=True)
    assert not complaints(caplog)


async def test_a_hello_that_is_answered_with_rubbish_is_a_protocol_error(caplog: pytest.LogCaptureFixture) -> None:
    async def rubbish(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return b"\xff\xff"

    server = new_server()
    hello: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(rubbish)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(frames.SERVICE, {"Hello": hello}),))
    async with linked() as links:
        with pytest.raises(ProtocolError, match="no HelloReply"):
            async with links.use(await listen(server, "127.0.0.1:0"), 1):
                pass
    await server.stop(None)
    assert not complaints(caplog)


async def test_an_idle_connection_outlives_more_pings_than_a_server_takes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes ten times as fast: gRPC's servers hang up at the third ping within five minutes without a call."""
    faster = [(name, value // 10 if name == "grpc.keepalive_time_ms" else value) for name, value in channel.OPTIONS]
    monkeypatch.setattr(channel, "OPTIONS", tuple(faster))
    monkeypatch.setattr("slipstream.rpc.server.OPTIONS", tuple(faster))
    monkeypatch.setattr("slipstream.rpc.server.KEEPALIVE_SECONDS", channel.KEEPALIVE_SECONDS / 10)
    server = new_server()
    address = await listen(server, "127.0.0.1:0")
    async with channel.connect(address) as idle:
        await asyncio.wait_for(idle.channel_ready(), 5)
        with suppress(TimeoutError):
            async with asyncio.timeout(5.5):
                await idle.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert idle.get_state() is grpc.ChannelConnectivity.READY
    await server.stop(0)
