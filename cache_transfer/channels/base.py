"""The seam between a Transfer and the path its payload takes; implementations are chosen by name, once, at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cache_transfer.channels.grpc import InlineChannel
from cache_transfer.frames import Range
from cache_transfer.memory import CacheMemory, Landing
from slipstream.errors import ConfigError


class Channel(Protocol):
    """Carries payload between the memories of two ranks. Both calls finish their work before they return."""

    def pack(self, memory: CacheMemory, where: Landing, ranges: Sequence[Range]) -> bytes:
        """Source: one frame that stands for these ranges."""

    def land(self, memory: CacheMemory, where: Landing, ranges: Sequence[Range], payload: memoryview) -> None:
        """Destination: put a frame's ranges in place. Raises ProtocolError."""


def choose(name: str) -> Channel:
    """Raises ConfigError listing the known names."""
    known: dict[str, Callable[[], Channel]] = {"grpc": InlineChannel}
    if name not in known:
        raise ConfigError(f"transfer.channel {name!r} is unknown; known: {', '.join(known)}", field="transfer.channel")
    return known[name]()
