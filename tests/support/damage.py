"""A channel that damages chosen frames: what a destination must notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache_transfer.channels.base import Buffer
from cache_transfer.channels.grpc import InlineChannel
from cache_transfer.spans import Spans


class Damaging(InlineChannel):
    """Flips a bit of the last byte of every frame that `hits`, by its number; `short`: leaves that byte out."""

    def __init__(self, hits: Callable[[int], bool] = lambda number: number == 0, *, short: bool = False,
                 frame_bytes: int = 1 << 20) -> None:
        super().__init__(frame_bytes)
        self.sent = 0
        self._hits = hits
        self._short = short

    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        payload = b"".join(await super().send(to, source, target))
        self.sent += 1
        if not self._hits(self.sent - 1):
            return [payload]
        return [payload[:-1]] if self._short else [payload[:-1], bytes((payload[-1] ^ 0x10,))]
