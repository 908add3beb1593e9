"""A rank's cache tensors as bytes: finds the pieces of a range, reads and writes them. Knows no owner and no stream.

Whoever calls must own the blocks and the slot that it names; nothing here can check that. What takes all of each row is pieces
of the memory itself, whole blocks where it can; what takes only some heads is gathered and scattered by numpy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cache_transfer.frames import Range
from cache_transfer.layout import CacheLayout, Cut, Kind, TensorSpec, whole
from slipstream.errors import ConfigError, InternalError, ProtocolError
from slipstream.sharding import Shard

_Rows = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Landing:
    """Where one prompt lies on this rank."""

    blocks: tuple[int, ...]
    """Block table: token i is row i % block_size of blocks[i // block_size]."""
    state_slot: int | None
    have_tokens: int = 0
    """Destination: rows [0, have_tokens), whole blocks, are here already. They are not sent, and never written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bound:
    """A tensor's memory, and what is seen of it."""

    spec: TensorSpec
    memory: memoryview
    slots: int
    """Blocks of a kv tensor, slots of a state."""
    size: int
    """Bytes of one token's keys, or of a slot."""
    cut: Cut
    rows: _Rows
    """A kv tensor as [block, k|v, row, byte of one token's keys]."""


class CacheMemory:
    """Binds the tensors of one rank to CPU memory. `narrowed`, it is what one stream carries of them; either is a `Part`."""

    def __init__(self, layout: CacheLayout, tensors: Mapping[str, Tensor], shard: Shard | None = None) -> None:
        """`shard`: the rank whose tensors these are; None: they are whole. Raises ConfigError for a tensor that is missing,
        strided, on a device, or of another size than the layout says."""
        self.layout = layout
        self.shard = shard or whole(layout)
        self.block_size = layout.block_size
        self.tensors = layout.held(self.shard)
        self._bound: list[_Bound] = []
        for spec in self.tensors:
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
            size = spec.unit_bytes // 2 if spec.kind is Kind.KV else spec.unit_bytes
            rows = np.frombuffer(view, np.uint8).reshape((tensor.shape[0], -1, layout.block_size, size)
                                                         if spec.kind is Kind.KV else -1)
            self._bound.append(_Bound(spec=spec, memory=view, slots=tensor.shape[0], size=size, cut=((0, size),), rows=rows))

    def narrowed(self, carried: Sequence[tuple[TensorSpec, Cut]]) -> CacheMemory:
        """The same memory, of which only these tensors, and of each only this cut, are seen."""
        by_name = {bound.spec.name: bound for bound in self._bound}
        seen = copy.copy(self)
        seen.tensors = tuple(spec for spec, _ in carried)
        seen._bound = [replace(by_name[spec.name], spec=spec, cut=cut) for spec, cut in carried]
        return seen

    def pieces(self, where: Landing, part: Range) -> Iterator[memoryview]:
        """The bytes of a range in payload order, to read; together `range_bytes(part)` long.

        Raises ProtocolError for a range outside the prompt's memory, InternalError for a block outside the pool.
        """
        for view in self._views(where, part):
            yield view if isinstance(view, memoryview) else memoryview(view.tobytes())

    def land(self, where: Landing, part: Range, payload: memoryview) -> None:
        """Write a range's payload. Raises ProtocolError where it does not fit."""
        offset = 0
        for view in self._views(where, part):
            if isinstance(view, memoryview):
                view[:] = payload[offset : offset + len(view)]
                offset += len(view)
            else:
                view[...] = np.frombuffer(payload, np.uint8, view.size, offset).reshape(view.shape)
                offset += view.size

    def _views(self, where: Landing, part: Range) -> Iterator[memoryview | _Rows]:
        """Where a range lies, in payload order: in contiguous pieces, or block by block as [k|v, row, byte] of some heads."""
        bound = self._bound[part.tensor]
        spec, memory = bound.spec, bound.memory
        if spec.kind is not Kind.KV:
            yield from _of_state(bound, where, part)
            return
        size, row, ((at, width),) = self.block_size, bound.size, bound.cut
        position, end = part.first, part.first + part.units
        if end > len(where.blocks) * size:
            raise ProtocolError(f"{spec.name}: rows up to {end} of {len(where.blocks)} blocks of {size}")
        while position < end:
            offset = position % size
            rows = min(size - offset, end - position)
            block = where.blocks[position // size]
            if not 0 <= block < bound.slots:
                raise InternalError(f"{spec.name}: block {block} of a pool of {bound.slots}")
            keys = block * 2 * size * row + offset * row
            if width < row:
                yield bound.rows[block, :, offset : offset + rows, at : at + width]
            elif rows == size:
                yield memory[keys : keys + 2 * size * row]
            else:
                yield memory[keys : keys + rows * row]
                yield memory[keys + size * row : keys + (size + rows) * row]
            position += rows

    def range_bytes(self, part: Range) -> int:
        """Payload bytes of a range. Raises ProtocolError for an unknown tensor."""
        if part.tensor >= len(self.tensors):
            raise ProtocolError(f"tensor {part.tensor} of {len(self.tensors)}")
        spec = self.tensors[part.tensor]
        return part.units * spec.unit_bytes if spec.kind is Kind.KV else part.units


def _of_state(bound: _Bound, where: Landing, part: Range) -> Iterator[memoryview]:
    """Bytes of a state, counted over its cut."""
    spec, slot = bound.spec, where.state_slot
    if slot is None or not 0 <= slot < bound.slots:
        raise ProtocolError(f"{spec.name}: no state slot {slot}")
    if part.first + part.units > spec.unit_bytes:
        raise ProtocolError(f"{spec.name}: bytes {part.first}+{part.units} of {spec.unit_bytes}")
    skip, left = part.first, part.units
    for at, length in bound.cut:
        taken = max(0, min(length - skip, left))
        start = slot * bound.size + at + skip
        if taken:
            yield bound.memory[start : start + taken]
        skip, left = max(0, skip - length), left - taken


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
