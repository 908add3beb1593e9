"""A Channel that damages what another one packs: the public fake for tests of what a destination must notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache_transfer.channels.base import Channel
from cache_transfer.frames import Range
from cache_transfer.memory import CacheMemory, Landing


class FaultyChannel:
    """`damage(n, frame)` gets the n-th packed frame and returns what is sent instead."""

    def __init__(self, inner: Channel, damage: Callable[[int, bytes], bytes]) -> None:
        self._inner = inner
        self._damage = damage
        self._packed = 0

    def pack(self, memory: CacheMemory, where: Landing, ranges: Sequence[Range]) -> bytes:
        """The inner channel's frame, damaged."""
        frame = self._damage(self._packed, self._inner.pack(memory, where, ranges))
        self._packed += 1
        return frame

    def land(self, memory: CacheMemory, where: Landing, ranges: Sequence[Range], payload: memoryview) -> None:
        """Unchanged."""
        self._inner.land(memory, where, ranges, payload)
