"""A source and a destination in this process, joined by real gRPC, with a log of what the source's owner is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cache_transfer.channels.base import Buffer, Channel
from cache_transfer.channels.grpc import InlineChannel
from cache_transfer.handoff import Handoff, HandoffChoice
from cache_transfer.layout import CacheLayout, whole
from cache_transfer.load import CacheLoader, Loaded
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import Paths
from cache_transfer.regions import Landing
from cache_transfer.source import SourceTransfer
from cache_transfer.spans import Spans
from cache_transfer.store import CacheStore
from slipstream.config import TransferConfig
from slipstream.errors import SlipstreamError
from slipstream.rpc.server import listen, new_server
from slipstream.sharding import Shard
from slipstream.types import MropeState, RequestId
from tests.support import transfer_rig

TOKENS = 40_000  # 20 MB: more than the sockets and gRPC take when nobody reads
PLACE = Landing(blocks=tuple(i % transfer_rig.BLOCKS for i in range(TOKENS // transfer_rig.BLOCK_SIZE)), state_slot=3)

PATIENCE_SECONDS = 60.0  # a busy machine takes long to start a process that imports torch


class CountingChannel(InlineChannel):
    """Counts frames that were packed, and payload bytes that landed."""

    def __init__(self, frame_bytes: int = 1 << 16) -> None:
        super().__init__(frame_bytes)
        self.packed = 0
        self.payloads: list[int] = []
        self.sending = asyncio.Event()
        self.landed = asyncio.Event()

    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        self.packed += 1
        self.sending.set()
        return await super().send(to, source, target)

    def land(self, origin: bytes, payload: memoryview, target: Spans) -> None:
        super().land(origin, payload, target)
        self.payloads.append(len(payload))
        self.landed.set()


class Log:
    """A TransferListener that remembers."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.error: SlipstreamError | None = None
        self._changed = asyncio.Event()

    def ready(self) -> None:
        self._add("ready")

    def parked(self, reason: str) -> None:
        self._add(f"parked: {reason}")

    def done(self, committed: bool) -> None:
        self._add("done" if committed else "done, not committed")

    def failed(self, error: SlipstreamError) -> None:
        self.error = error
        self._add("failed")

    def _add(self, event: str) -> None:
        self.heard.append(event)
        self._changed.set()

    async def until(self, *events: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.heard != list(events):
                self._changed.clear()
                await self._changed.wait()

    async def until_last(self, *starts: str) -> None:
        """Until the last event starts with one of these."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (self.heard and self.heard[-1].startswith(starts)):
                self._changed.clear()
                await self._changed.wait()


class Site:
    """A source."""

    def __init__(self, channel: Channel, layout: CacheLayout | None = None, frame_bytes: int = 1 << 16, epoch: int = 1,
                 shard: Shard | None = None, lease_seconds: float = 30.0, stall_seconds: float = 10.0) -> None:
        self.layout = layout or transfer_rig.layout()
        self.shard = shard or whole(self.layout)
        self.held = transfer_rig.cut(self.layout, transfer_rig.tensors(self.layout, seed=1), self.shard)
        self.memory = CacheMemory(self.layout, self.held, shard)
        channel.frame_bytes = frame_bytes
        self.store = CacheStore(self.memory, Paths([channel]), replica_id="p0", epoch=epoch, rank=self.shard.rank,
                                config=TransferConfig(lease_seconds=lease_seconds, stall_seconds=stall_seconds))
        self.server = new_server()
        self.address = ""

    def prompt(self, name: str, tokens: int = TOKENS, *, cached: int = 0, where: Landing = PLACE) -> tuple[SourceTransfer, Log]:
        """Announced and placed; nothing is computed yet."""
        log = Log()
        transfer = self.store.expect(name, RequestId(name="r"), tokens, log)
        transfer.begin(cached)
        transfer.allocated(where.blocks, where.state_slot, cached)
        return transfer, log

    def compute(self, transfer: SourceTransfer, tokens: int = TOKENS, *, layers: int | None = None) -> None:
        """The whole prompt in one chunk; `layers`: only the first of them, and no first token."""
        for layer in range(len(self.layout.layers) if layers is None else layers):
            transfer.layer_done(layer, tokens, True)
        if layers is None or layers == len(self.layout.layers):
            transfer.finish(handoff(tokens))


def handoff(tokens: int, *choices: HandoffChoice) -> Handoff:
    """By default of one choice that goes on."""
    return Handoff(request_id="r", prompt_tokens=tokens, state_token_count=tokens,
                   choices=choices or (HandoffChoice(first_token=7),), mrope=MropeState(delta=0, last_position=(1, 2, 3)))


@asynccontextmanager
async def serving(channel: Channel | None = None, layout: CacheLayout | None = None, *, frame_bytes: int = 1 << 16,
                  epoch: int = 1, address: str = "127.0.0.1:0", shard: Shard | None = None,
                  lease_seconds: float = 30.0, stall_seconds: float = 10.0) -> AsyncIterator[Site]:
    site = Site(channel or CountingChannel(), layout, frame_bytes, epoch, shard, lease_seconds, stall_seconds)
    site.store.add_to(site.server)
    site.address = await listen(site.server, address)
    try:
        yield site
    finally:
        await site.server.stop(None)


class Destination:
    """A destination."""

    def __init__(self, address: str, connect_seconds: float, layout: CacheLayout | None, idle_seconds: float,
                 shard: Shard | None = None, channel: CountingChannel | None = None) -> None:
        self.address = address
        self.channel = channel or CountingChannel()
        self.layout = layout or transfer_rig.layout()
        self.memory, self.held = transfer_rig.destination(self.layout, shard)
        self.paths = Paths([self.channel])
        self.loader = CacheLoader(self.memory, self.paths, replica_id="d0", epoch=1, rank=self.memory.shard.rank,
                                  config=TransferConfig(connect_seconds=connect_seconds), idle_seconds=idle_seconds)

    async def load(self, name: str, *, attempt: int = 0, seconds: float = 20.0, epoch: int = 1, where: Landing | None = PLACE,
                   refusal: SlipstreamError | None = None, hang: bool = False, request: str = "r", address: str = "") -> Loaded:
        async def admit(num_tokens: int) -> Landing | None:
            if refusal is not None:
                raise refusal
            if hang:
                await asyncio.Event().wait()
            return where

        return await self.loader.load([address or self.address], transfer_id=name, attempt=attempt, source_epoch=epoch,
                                      request_id=request, remaining_seconds=seconds, admit=admit)


@asynccontextmanager
async def destination(address: str, connect_seconds: float = 5.0, layout: CacheLayout | None = None, *,
                      idle_seconds: float = 300.0, channel: CountingChannel | None = None) -> AsyncIterator[Destination]:
    here = Destination(address, connect_seconds, layout, idle_seconds, channel=channel)
    try:
        yield here
    finally:
        await here.loader.close()
