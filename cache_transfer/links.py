"""Connections to sources: one channel to each source process, greeted once, closed when nobody has used it for a while.

Knows no transfer. A link is in use while somebody waits for its Hello or opens a stream, and while a stream on it is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from google.protobuf.message import Message

from cache_transfer import frames, plan
from cache_transfer.frames import SERVICE
from cache_transfer.layout import CacheLayout, differences
from cache_transfer.paths import Paths, Way
from slipstream.errors import IncompatibleError, TransferError
from slipstream.rpc.channel import connect
from slipstream.rpc.security import OPEN, Security
from slipstream.sharding import Shard
from slipstream.v1 import cache_store_pb2 as pb

IDLE_SECONDS = 300.0
MAX_IDLE = 64

Call = grpc.aio.StreamStreamCall[bytes, bytes]


class Link:
    """One source process, by address and epoch."""

    def __init__(self, links: Links, address: str, epoch: int) -> None:
        self.key = address, epoch
        self.channel = connect(address, links.security)
        self.shard: Shard
        """Which rank it is, once it was greeted."""
        self.way: Way
        """How its memory is read, once it was greeted."""
        self.users = 0
        self.idle: asyncio.TimerHandle | None = None
        self._links = links

    def transfer(self, seconds: float) -> Call:
        """Open a Transfer stream of at most so many seconds; the link is in use until it ends, however it does."""
        call: Call = self.channel.stream_stream(f"/{SERVICE}/Transfer")(timeout=seconds)
        self._links.take(self)
        call.add_done_callback(lambda _: self._links.let_go(self))
        return call


class Links:
    """One per loader."""

    def __init__(self, hello: pb.HelloRequest, layout: CacheLayout, paths: Paths, *, connect_seconds: float,
                 idle_seconds: float = IDLE_SECONDS, max_idle: int = MAX_IDLE, security: Security = OPEN) -> None:
        """`hello`: our side's. `max_idle`: links that nobody uses; one more closes the one that has been idle longest."""
        self._hello = hello
        self._layout = layout
        self._paths = paths
        self.security = security
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._max_idle = max_idle
        self._known: dict[tuple[str, int], Link] = {}  # given to new users; the idle ones among them in the order of last use
        self._open: dict[Link, asyncio.Task[None]] = {}  # with their Hellos: the known ones, and retired ones that have users
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Channels that are not closed."""
        return len(self._open)

    async def close(self) -> None:
        """Close every connection; whoever still uses one fails."""
        for link, hello in list(self._open.items()):
            hello.cancel()
            link.users = 0
            self._retire(link)
        await asyncio.gather(*self._closing)

    @asynccontextmanager
    async def use(self, address: str, epoch: int) -> AsyncIterator[Link]:
        """A greeted link. If the body raises AioRpcError, the link is broken: the next user gets a new one.

        Raises IncompatibleError, ProtocolError or TransferError.
        """
        link = self._known.get((address, epoch)) or self._new(address, epoch)
        self.take(link)
        try:
            await asyncio.shield(self._open[link])  # shared by everyone who waits for it
            yield link
        except grpc.aio.AioRpcError:
            self._retire(link)
            raise
        finally:
            self.let_go(link)

    def take(self, link: Link) -> None:
        """One more user."""
        link.users += 1
        if link.idle is not None:
            link.idle.cancel()
            link.idle = None

    def let_go(self, link: Link) -> None:
        """One user less; the last one starts the clock, or closes a link that was retired meanwhile."""
        link.users -= 1
        if link.users or link not in self._open:
            return
        if self._known.get(link.key) is not link:
            self._close(link)
            return
        self._known[link.key] = self._known.pop(link.key)
        link.idle = asyncio.get_running_loop().call_later(self._idle_seconds, self._retire, link)
        idle = [other for other in self._known.values() if not other.users]
        if len(idle) > self._max_idle:
            self._retire(idle[0])

    def _new(self, address: str, epoch: int) -> Link:
        for other in [other for other in self._known.values() if other.key[0] == address and other.key[1] < epoch]:
            self._retire(other)  # the source has restarted
        link = self._known[address, epoch] = Link(self, address, epoch)
        hello = self._open[link] = asyncio.create_task(self._greet(link))
        hello.add_done_callback(lambda done: self._retire(link) if done.cancelled() or done.exception() else None)
        return link

    def _retire(self, link: Link) -> None:
        """Give it to nobody any more."""
        if self._known.get(link.key) is link:
            del self._known[link.key]
        if not link.users:
            self._close(link)

    def _close(self, link: Link) -> None:
        if self._open.pop(link, None) is None:
            return
        if link.idle is not None:
            link.idle.cancel()
        closing = asyncio.get_running_loop().create_task(link.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _greet(self, link: Link) -> None:
        address, epoch = link.key
        try:
            hello = pb.HelloRequest(channels=self._paths.addresses())
            hello.MergeFrom(self._hello)
            reply = frames.decode(pb.HelloReply, await self._ask(link, "Hello", hello))
        except grpc.aio.AioRpcError as error:
            raise TransferError(f"no Hello from the cache store at {address} within {self._connect_seconds} s: "
                                f"{error.code().name} {error.details()}") from error
        if reply.epoch != epoch:
            raise TransferError(f"{address} is {reply.replica_id} of epoch {reply.epoch}, not {epoch}: it has restarted")
        differ = differences(self._layout.fields(), dict(reply.layout.fields))
        if differ or not reply.compatible:
            raise IncompatibleError(f"{reply.replica_id} at {address} keeps its cache another way: {differ or reply.reason}")
        link.shard = Shard(geometry=frames.geometry_from_pb(reply, len(self._layout.layers)), rank=reply.rank)
        plan.check(self._layout, link.shard)

        async def probe(request: pb.ProbeRequest) -> pb.ProbeReply:
            try:
                return frames.decode(pb.ProbeReply, await self._ask(link, "Probe", request))
            except grpc.aio.AioRpcError as error:
                return pb.ProbeReply(failure=f"{error.code().name} {error.details()}")

        link.way = await self._paths.choose(dict(reply.channels), f"{reply.replica_id} at {address}", probe)

    async def _ask(self, link: Link, method: str, message: Message) -> bytes:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = link.channel.unary_unary(f"/{SERVICE}/{method}")
        return await call(message.SerializeToString(), timeout=self._connect_seconds, wait_for_ready=True)
