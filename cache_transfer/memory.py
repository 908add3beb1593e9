"""A rank's cache tensors as bytes: finds the pieces of a range, reads and writes them. Knows no owner and no stream.

Whoever calls must own the blocks and the slot that it names; nothing here can check that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cache_transfer.frames import Range
from cache_transfer.layout import CacheLayout, Kind
from slipstream.errors import ConfigError, InternalError, ProtocolError


@dataclass(frozen=True, kw_only=True)
class Landing:
    """Where one prompt lies on this rank."""

    blocks: tuple[int, ...]
    """Block table: token i is row i % block_size of blocks[i // block_size]."""
    state_slot: int | None
    have_tokens: int = 0
    """Destination: rows [0, have_tokens), whole blocks, are here already. They are not sent, and never written."""


class CacheMemory:
    """Binds a layout's tensor names to CPU tensors."""

    def __init__(self, layout: CacheLayout, tensors: Mapping[str, Tensor]) -> None:
        """Raises ConfigError for a tensor that is missing, strided, on a device, or of another size than the layout says."""
        self.layout = layout
        self._bytes: list[memoryview] = []
        self._slots: list[int] = []
        for spec in layout.tensors:
            if spec.name not in tensors:
                raise ConfigError(f"the cache has no tensor {spec.name}; it has {', '.join(sorted(tensors))}")
            tensor = tensors[spec.name]
            if tensor.device.type != "cpu":
                raise ConfigError(f"{spec.name} is on {tensor.device}; this channel moves CPU memory only")
            if not tensor.is_contiguous():
                raise ConfigError(f"{spec.name} is a strided view; register the contiguous tensor")
            view = memoryview(np.ascontiguousarray(tensor.view(torch.uint8).reshape(-1).numpy()).data)
            unit = spec.unit_bytes * (layout.block_size if spec.kind is Kind.KV else 1)
            if len(view) != unit * tensor.shape[0]:
                raise ConfigError(f"{spec.name} has {len(view)} bytes; its layout says {tensor.shape[0]} times {unit}")
            self._bytes.append(view)
            self._slots.append(tensor.shape[0])

    def pieces(self, where: Landing, part: Range) -> Iterator[memoryview]:
        """The contiguous pieces of a range, in payload order; together `range_bytes(part)` long.

        Raises ProtocolError for a range outside the prompt's memory, InternalError for a block outside the pool.
        """
        spec = self.layout.tensors[part.tensor]
        memory = self._bytes[part.tensor]
        if spec.kind is not Kind.KV:
            if where.state_slot is None or not 0 <= where.state_slot < self._slots[part.tensor]:
                raise ProtocolError(f"{spec.name}: no state slot {where.state_slot}")
            if part.first + part.units > spec.unit_bytes:
                raise ProtocolError(f"{spec.name}: bytes {part.first}+{part.units} of {spec.unit_bytes}")
            start = where.state_slot * spec.unit_bytes + part.first
            yield memory[start : start + part.units]
            return
        size, row = self.layout.block_size, spec.unit_bytes // 2
        position, end = part.first, part.first + part.units
        if end > len(where.blocks) * size:
            raise ProtocolError(f"{spec.name}: rows up to {end} of {len(where.blocks)} blocks of {size}")
        while position < end:
            offset = position % size
            rows = min(size - offset, end - position)
            block = where.blocks[position // size]
            if not 0 <= block < self._slots[part.tensor]:
                raise InternalError(f"{spec.name}: block {block} of a pool of {self._slots[part.tensor]}")
            keys = block * 2 * size * row + offset * row
            if rows == size:
                yield memory[keys : keys + 2 * size * row]
            else:
                yield memory[keys : keys + rows * row]
                yield memory[keys + size * row : keys + (size + rows) * row]
            position += rows

    def range_bytes(self, part: Range) -> int:
        """Payload bytes of a range. Raises ProtocolError for an unknown tensor."""
        if part.tensor >= len(self.layout.tensors):
            raise ProtocolError(f"tensor {part.tensor} of {len(self.layout.tensors)}")
        spec = self.layout.tensors[part.tensor]
        return part.units * spec.unit_bytes if spec.kind is Kind.KV else part.units

    def land(self, where: Landing, part: Range, payload: memoryview) -> None:
        """Write a range's payload. Raises ProtocolError where it does not fit."""
        offset = 0
        for piece in self.pieces(where, part):
            piece[:] = payload[offset : offset + len(piece)]
            offset += len(piece)


def tune_allocator() -> None:
    """Keep large buffers in the process between messages (glibc): without it every frame is mapped, faulted in and unmapped.

    Called by a worker's main, never at import; does nothing on another C library.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, 1 << 30)
