"""What a destination says of its memory to a source that writes into it: where its tensors are, which blocks it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache_transfer import regions
from cache_transfer.layout import Cut, Range
from cache_transfer.regions import Landing, Region
from cache_transfer.spans import Spans
from slipstream.errors import ProtocolError
from slipstream.v1 import cache_store_pb2 as pb


@dataclass(frozen=True)
class Invitation:
    """A prompt's place in the destination's memory."""

    regions: tuple[Region, ...]
    where: Landing

    def spans(self, ranges: Sequence[Range]) -> Spans:
        """Where the bytes of some ranges go. Raises ProtocolError if the prompt has no such place."""
        return regions.of_ranges(self.regions, self.where, ranges)


def to_pb(seen: Sequence[Region], where: Landing) -> pb.Invitation:
    """For the wire."""
    return pb.Invitation(blocks=where.blocks, state_slot=where.state_slot, regions=[
        pb.Region(base=region.base, slots=region.slots, slot_bytes=region.slot_bytes, cut=_flat(region.cut))
        for region in seen])


def _flat(cut: Cut) -> list[int]:
    return [number for run in cut for number in run]


def from_pb(message: pb.Invitation, ours: Sequence[Region]) -> Invitation:
    """From the wire: the peer's tensors, which are like `ours` but for where they lie. Raises ProtocolError."""
    if len(message.regions) != len(ours):
        raise ProtocolError(f"an invitation to {len(message.regions)} tensors on a stream that carries {len(ours)}")
    found = []
    for region, mine in zip(message.regions, ours, strict=True):
        cut = tuple(zip(region.cut[::2], region.cut[1::2], strict=False))
        if (len(region.cut) % 2 or sum(size for _, size in cut) != sum(size for _, size in mine.cut)
                or (mine.rows and len(cut) != 1) or any(at + size > region.slot_bytes for at, size in cut)):
            raise ProtocolError(f"an invitation that cuts {mine.name} another way")
        found.append(replace(mine, base=region.base, slots=region.slots, slot_bytes=region.slot_bytes, cut=cut))
    slot = message.state_slot if message.HasField("state_slot") else None
    return Invitation(tuple(found), Landing(blocks=tuple(message.blocks), state_slot=slot))
