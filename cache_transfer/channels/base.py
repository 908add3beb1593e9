"""The seam between a Transfer and the path of its bytes. A channel moves spans of memory; it knows no tensor and no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cache_transfer.spans import Spans

Buffer = bytes | memoryview


class LostError(Exception):
    """The way to the peer broke, or the peer left; the prompt itself is well. The text says how, for `parked`."""


class Channel(Protocol):
    """Carries bytes from the memory of a source to the memory of a destination. Used on an event loop.

    A peer is named by what its own `address` says, which travels in Hello and Open.
    """

    name: str
    direct: bool
    """The source writes into the destination's memory by itself: it is told where, and what was written is not in the frame."""
    pulls: bool
    """The destination reads the source's memory by itself, some time after the frame was sent."""
    frame_bytes: int
    """What one `send` should move; more makes nothing faster and others wait longer."""
    depth: int
    """How many sends of one stream may be under way at once."""

    def address(self) -> bytes:
        """How peers reach this side's memory; empty if by the Transfer stream alone."""

    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        """Source: move the bytes, or say in the frame's payload (the answer) what the destination needs to move them.

        `target`: where they land, empty unless `direct`. Raises LostError. When this has ended, however it ended, nothing is
        written into the target any more; if that cannot be known it ends with UnsettledError.
        """

    def land(self, origin: bytes, payload: memoryview, target: Spans) -> None:
        """Destination: when this returns, a frame's bytes are in place. Raises ProtocolError or TransferError."""

    async def fence(self, origin: bytes, invited: bytes) -> None:
        """Destination: returns when nothing that this peer began can be written here any more. It is lost and cannot say so.

        `invited`: our `address` as it was told.
        """

    async def close(self) -> None:
        """End it; what is still under way fails."""


class StuckError(LostError):
    """Nothing moved for too long."""


class UnsettledError(LostError):
    """A write was given up and may still happen: the destination must not hear that it is over."""
