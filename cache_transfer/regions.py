"""Where the bytes of a range lie in one rank's memory. Pure: computes addresses, touches none.

The same for our own memory and, on a channel that writes into the peer's, for what the peer said of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache_transfer import spans
from cache_transfer.layout import Cut, Kind, Range
from cache_transfer.spans import Spans
from slipstream.errors import InternalError, ProtocolError


@dataclass(frozen=True, kw_only=True)
class Landing:
    """Where one prompt lies on this rank."""

    blocks: tuple[int, ...]
    """Block table: token i is row i % block_size of blocks[i // block_size]."""
    state_slot: int | None
    have_tokens: int = 0
    """Destination: rows [0, have_tokens), whole blocks, are here already. They are not sent, and never written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One tensor's memory, and what is seen of it."""

    name: str
    kind: Kind
    base: int
    """Address of its first byte."""
    slots: int
    """Blocks of a kv tensor, slots of a state."""
    slot_bytes: int
    cut: Cut
    """(offset, bytes) of a slot; of a block it is one run of whole heads."""
    rows: int = 0
    """kv: token rows of a block."""
    row_bytes: int = 0
    """kv: of one head's keys of one token."""

    def spans(self, where: Landing, part: Range) -> Spans:
        """The bytes of a range in payload order. Raises ProtocolError for a range outside the prompt's memory, InternalError
        for a block outside the pool."""
        if self.kind is Kind.KV:
            return self._of_rows(where.blocks, part.first, part.first + part.units)
        return self._of_state(where.state_slot, part.first, part.first + part.units)

    def _of_rows(self, blocks: Sequence[int], first: int, end: int) -> Spans:
        if end > len(blocks) * self.rows:
            raise ProtocolError(f"{self.name}: rows up to {end} of {len(blocks)} blocks of {self.rows}")
        used = blocks[first // self.rows : -(-end // self.rows)]
        if used and not 0 <= min(used) <= max(used) < self.slots:
            raise InternalError(f"{self.name}: block {min(used) if min(used) < 0 else max(used)} of a pool of {self.slots}")
        lowest, highest = -(-first // self.rows), end // self.rows  # whole blocks
        if lowest > highest:
            return self._of_some_rows(blocks[first // self.rows], first % self.rows, end - first)
        found = []
        if first % self.rows:
            found.append(self._of_some_rows(blocks[lowest - 1], first % self.rows, self.rows - first % self.rows))
        if lowest < highest:
            (at, length), = self.cut
            starts = self.base + at + np.asarray(blocks[lowest:highest], np.int64) * self.slot_bytes
            found.append(_spans(starts, length))
        if end % self.rows:
            found.append(self._of_some_rows(blocks[highest], 0, end % self.rows))
        return found[0] if len(found) == 1 else np.concatenate(found) if found else spans.EMPTY

    def _of_some_rows(self, block: int, first: int, count: int) -> Spans:
        """Of one block: head by head, keys then values."""
        (at, length), = self.cut
        run = self.rows * self.row_bytes  # of one head's keys
        start = self.base + block * self.slot_bytes + at + first * self.row_bytes
        return _spans(start + np.arange(length // run, dtype=np.int64) * run, count * self.row_bytes)

    def _of_state(self, slot: int | None, first: int, end: int) -> Spans:
        if slot is None or not 0 <= slot < self.slots:
            raise ProtocolError(f"{self.name}: no state slot {slot}")
        if end > sum(length for _, length in self.cut):
            raise ProtocolError(f"{self.name}: bytes up to {end} of {sum(length for _, length in self.cut)}")
        found, passed = [], 0
        for at, length in self.cut:
            low, high = max(first - passed, 0), min(end - passed, length)
            if low < high:
                found.append((self.base + slot * self.slot_bytes + at + low, high - low))
            passed += length
        return spans.of(*found)


def of_ranges(regions: Sequence[Region], where: Landing, ranges: Sequence[Range]) -> Spans:
    """The bytes of some ranges, in payload order. Raises ProtocolError also for a tensor that there is not."""
    for part in ranges:
        if part.tensor >= len(regions):
            raise ProtocolError(f"tensor {part.tensor} of {len(regions)}")
    return spans.joined([regions[part.tensor].spans(where, part) for part in ranges])


def _spans(starts: npt.NDArray[np.int64], length: int) -> Spans:
    found = np.empty((len(starts), 2), np.uint64)
    found[:, 0], found[:, 1] = starts, length
    return found
