"""Payload inline on the Transfer stream: works wherever gRPC does. One gather on the source, one scatter on the destination."""

from __future__ import annotations

from collections.abc import Sequence

from cache_transfer import spans
from cache_transfer.channels.base import Buffer
from cache_transfer.spans import Spans


class InlineChannel:
    """Implements Channel. Spans of any number of blocks and layers share a frame, so messages do not grow with either."""

    name = "grpc"
    direct = pulls = False
    depth = 1

    def __init__(self, frame_bytes: int = 1 << 20) -> None:
        self.frame_bytes = frame_bytes

    def address(self) -> bytes:
        """The stream is the way."""
        return b""

    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        """The memory itself: it is copied when the frame is made."""
        return list(spans.views(source))

    def land(self, origin: bytes, payload: memoryview, target: Spans) -> None:
        """Raises ProtocolError if the payload is not exactly as long as its ranges."""
        spans.scatter(payload, target)

    async def fence(self, origin: bytes, invited: bytes) -> None:
        """Only this process writes here."""

    async def close(self) -> None:
        """Nothing is open."""
