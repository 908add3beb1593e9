"""Payload inline on the Transfer stream: works wherever gRPC does. One gather on the source, one scatter on the destination."""

from __future__ import annotations

from collections.abc import Sequence

from cache_transfer.frames import Range, data_header
from cache_transfer.memory import CacheMemory, Landing
from slipstream.errors import ProtocolError


class InlineChannel:
    """Ranges of any number of blocks and layers share a frame, so messages do not grow with blocks times layers."""

    def pack(self, memory: CacheMemory, where: Landing, ranges: Sequence[Range]) -> bytes:
        """Header and payload in one buffer."""
        pieces: list[bytes | memoryview] = [data_header(ranges)]
        for part in ranges:
            pieces.extend(memory.pieces(where, part))
        return b"".join(pieces)

    def land(self, memory: CacheMemory, where: Landing, ranges: Sequence[Range], payload: memoryview) -> None:
        """Raises ProtocolError if the payload is not exactly as long as its ranges."""
        wanted = sum(memory.range_bytes(part) for part in ranges)
        if len(payload) != wanted:
            raise ProtocolError(f"a data frame with {len(payload)} payload bytes for ranges of {wanted}")
        offset = 0
        for part in ranges:
            size = memory.range_bytes(part)
            memory.land(where, part, payload[offset : offset + size])
            offset += size
