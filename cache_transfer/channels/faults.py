"""A source's sick channel: delays, loses, repeats, damages, cuts, stalls and slows what goes out, by configuration.

What a drill or a test switches on here must end in the right tokens or in a typed error, never in wrong tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from cache_transfer import frames, spans
from cache_transfer.channels.base import Buffer, Channel, LostError
from cache_transfer.spans import Spans
from slipstream.config import FaultsConfig

Write = Callable[[bytes], Awaitable[None]]


class Faults:
    """Of one source rank: what all of its streams share."""

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._sent = 0
        self._free_at = 0.0  # when the link has sent what it was given, on the loop's clock

    def channel(self, inner: Channel) -> Channel:
        """`inner` with a slow link and wrong bytes."""
        return FaultyChannel(inner, self)

    def hits(self, share: float) -> bool:
        """Draw."""
        return self._random.random() < share

    @property
    def corrupts(self) -> bool:
        """Draw for one frame."""
        return self.hits(self._config.corrupt)

    async def pass_bytes(self, count: int) -> None:
        """Wait for the link, and for ever once it has stalled."""
        loop, config = asyncio.get_running_loop(), self._config
        self._sent += count
        if config.stall_at_bytes and self._sent > config.stall_at_bytes:
            await loop.create_future()
        if config.bytes_per_second:
            self._free_at = max(self._free_at, loop.time()) + count / config.bytes_per_second
            await asyncio.sleep(self._free_at - loop.time())

    def writer(self, write: Write) -> Write:
        """A stream's data frames late, lost, twice, or not at all."""
        config = self._config

        async def sick(frame: bytes) -> None:
            if not frames.is_data(frame):
                await write(frame)
                return
            if config.delay_seconds:
                await asyncio.sleep(self._random.random() * config.delay_seconds)
            if self.hits(config.cut):
                raise LostError("transfer.faults cut the stream")
            if self.hits(config.drop):
                return
            await write(frame)
            if self.hits(config.duplicate):
                await write(frame)

        return sick


class FaultyChannel:
    """Implements Channel."""

    def __init__(self, inner: Channel, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.name, self.direct, self.pulls = inner.name, inner.direct, inner.pulls
        self.frame_bytes, self.depth = inner.frame_bytes, inner.depth

    def address(self) -> bytes:
        """The inner channel's."""
        return self._inner.address()

    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        """The inner channel's, after the link had time for it; or the two halves of the bytes in each other's place."""
        await self._faults.pass_bytes(spans.total(source))
        if self._faults.corrupts:
            half = spans.total(source) // 2
            first, second = spans.split(source, half)
            source = spans.joined([second, first])
        return await self._inner.send(to, source, target)

    def land(self, origin: bytes, payload: memoryview, target: Spans) -> None:
        """The inner channel's: faults are a source's."""
        self._inner.land(origin, payload, target)

    async def fence(self, origin: bytes, invited: bytes) -> None:
        """The inner channel's."""
        await self._inner.fence(origin, invited)

    async def close(self) -> None:
        """The inner channel's."""
        await self._inner.close()
