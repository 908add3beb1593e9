"""One-sided: the source writes straight into the destination's memory, by the engine that is installed (NIXL, Mooncake).

A write that was given up may still land, also after its handle, the peer and the registration are gone. So the source ends a
stream in order only when its writes are over; a destination that does not hear so keeps the memory from use until the source is
dead, where it runs on this host, or has lost its way here: the engine that it wrote to is closed, another takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from cache_transfer import spans
from cache_transfer.channels.base import Buffer, LostError, UnsettledError
from cache_transfer.channels.engines.base import Engine, Write
from cache_transfer.channels.host import Process
from cache_transfer.spans import Spans
from slipstream.errors import ProtocolError, SlipstreamError

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.0005
"""Between two polls; other writes are under way meanwhile."""
_ALIVE_SECONDS = 0.1
"""Between two looks at whether a process still lives."""


class _Address(msgspec.Struct, frozen=True, kw_only=True):
    process: Process
    engine: bytes


class RdmaChannel:
    """Implements Channel."""

    name = "rdma"
    direct, pulls = True, False
    frame_bytes = 8 << 20  # on one host a post copies: a millisecond of the event loop
    depth = 4

    def __init__(self, make: Callable[[], Engine], memory: Spans, *, stall_seconds: float, quarantine_seconds: float) -> None:
        """`memory`: what it moves. `stall_seconds`: longest wait for one write. `quarantine_seconds`: how long a peer on
        another host that does not say that it has stopped is waited for."""
        self._make = make
        self._memory = memory
        self._stall_seconds = stall_seconds
        self._quarantine_seconds = quarantine_seconds
        self._here = Process.here()
        self._renewing = asyncio.Lock()
        self._peers: dict[bytes, str] = {}
        self._engine = self._made()

    def _made(self) -> Engine:
        engine = self._make()
        engine.register(self._memory)
        self._peers.clear()
        self._address = msgspec.msgpack.encode(_Address(process=self._here, engine=engine.address()))
        return engine

    @property
    def engine(self) -> str:
        """Its name: both sides need the same."""
        return self._engine.name

    def address(self) -> bytes:
        """This process and its engine; another one after a renewal."""
        return self._address

    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        """One post; it is over when this returns."""
        ours, theirs = spans.paired(source, target)
        engine = self._engine
        try:
            if to not in self._peers:
                self._peers[to] = await asyncio.to_thread(engine.connect, _parsed(to).engine)
            write = engine.write(self._peers[to], ours, theirs)
        except SlipstreamError as error:
            self._peers.pop(to, None)
            raise LostError(error.message) from error
        try:
            await self._over(write)
        except UnsettledError:
            self._peers.pop(to, None)
            raise
        return ()

    async def _over(self, write: Write) -> None:
        """Also if the caller is cancelled meanwhile: the memory is the write's until then."""
        loop, cancelled = asyncio.get_running_loop(), False
        deadline = loop.time() + self._stall_seconds
        try:
            while not write.poll():
                if loop.time() > deadline:
                    raise UnsettledError(f"the transfer stalled: a write was not over within {self._stall_seconds:g} s")
                try:
                    await asyncio.sleep(_PAUSE_SECONDS)
                except asyncio.CancelledError:
                    cancelled = True
        except SlipstreamError as error:
            raise UnsettledError(error.message) from error
        if cancelled:
            raise asyncio.CancelledError

    def land(self, origin: bytes, payload: memoryview, target: Spans) -> None:
        """It is here already."""
        if len(payload):
            raise ProtocolError(f"a data frame with {len(payload)} payload bytes on a channel whose source writes by itself")

    async def fence(self, origin: bytes, invited: bytes) -> None:
        """Wait for the death of a source on this host, which copies by itself; after a while, take from any other its way."""
        peer = _parsed(origin).process
        if peer.beside(self._here):
            while peer.alive:  # noqa: ASYNC110 - the kernel tells only parents
                await asyncio.sleep(_ALIVE_SECONDS)
            return
        await asyncio.sleep(self._quarantine_seconds if self._address == invited else 0)
        async with self._renewing:
            if self._address == invited:
                old = self._engine
                self._engine = await asyncio.to_thread(self._made)
                await asyncio.to_thread(old.close)
                logger.warning("a source did not say that it has stopped writing here: the engine was renewed, and transfers "
                               "that were under way to this rank fail")

    async def close(self) -> None:
        """What is under way fails."""
        await asyncio.to_thread(self._engine.close)


def _parsed(address: bytes) -> _Address:
    try:
        return msgspec.msgpack.decode(address, type=_Address)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{len(address)} bytes that are no address of this channel: {error}") from error
