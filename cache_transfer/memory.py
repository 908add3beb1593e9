"""A rank's cache tensors as regions of memory. Knows no owner and no stream.

Whoever calls must own the blocks and the slot that it names; nothing here can check that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from cache_transfer import regions, spans
from cache_transfer.layout import CacheLayout, Cut, Kind, Range, TensorSpec, whole
from cache_transfer.regions import Landing, Region
from cache_transfer.spans import Spans
from slipstream.errors import ConfigError
from slipstream.sharding import Shard


class CacheMemory:
    """Binds the tensors of one rank to CPU memory. `narrowed`, it is what one stream carries of them; either is a `Part`."""

    def __init__(self, layout: CacheLayout, tensors: Mapping[str, Tensor], shard: Shard | None = None) -> None:
        """`shard`: the rank whose tensors these are; None: they are whole. Raises ConfigError for a tensor that is missing,
        strided, on a device, or of another size than the layout says."""
        self.layout = layout
        self.shard = shard or whole(layout)
        self.block_size = layout.block_size
        self.tensors = layout.held(self.shard)
        self._kept = {spec.name: _usable(spec, tensors) for spec in self.tensors}  # an address keeps nothing alive
        self.regions = tuple(self._bound(spec, self._kept[spec.name]) for spec in self.tensors)

    def _bound(self, spec: TensorSpec, tensor: Tensor) -> Region:
        rows = self.block_size if spec.kind is Kind.KV else 1
        size, slots = tensor.numel() * tensor.element_size(), tensor.shape[0]
        if size != slots * spec.unit_bytes * rows:
            raise ConfigError(f"{spec.name} has {size} bytes; its layout says {slots} times {spec.unit_bytes * rows}")
        region = Region(name=spec.name, kind=spec.kind, base=tensor.data_ptr(), slots=slots,
                        slot_bytes=spec.unit_bytes * rows, cut=((0, spec.unit_bytes * rows),))
        return replace(region, rows=rows, row_bytes=spec.runs[0][1]) if spec.kind is Kind.KV else region

    @property
    def extent(self) -> Spans:
        """All of it, for a channel that must register what it moves."""
        return spans.of(*((region.base, region.slots * region.slot_bytes) for region in self.regions))

    def narrowed(self, carried: Sequence[tuple[TensorSpec, Cut]]) -> CacheMemory:
        """The same memory, of which only these tensors, and of each only this cut, are seen. A kv tensor's cut is of one
        token's keys, and takes whole heads."""
        by_name = {region.name: region for region in self.regions}
        seen = copy.copy(self)
        seen.tensors = tuple(spec for spec, _ in carried)
        seen.regions = tuple(_narrowed(by_name[spec.name], cut) for spec, cut in carried)
        return seen

    def spans(self, where: Landing, ranges: Sequence[Range]) -> Spans:
        """Where the bytes of some ranges lie, in payload order.

        Raises ProtocolError for a range outside the prompt's memory, InternalError for a block outside the pool.
        """
        return regions.of_ranges(self.regions, where, ranges)

    def named(self, ranges: Sequence[Range]) -> str:
        """For a message."""
        return ", ".join(f"{self.tensors[part.tensor].name} {part.first} to {part.first + part.units}" for part in ranges)


def _usable(spec: TensorSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    if spec.name not in tensors:
        raise ConfigError(f"the cache has no tensor {spec.name}; it has {', '.join(sorted(tensors))}")
    tensor = tensors[spec.name]
    if tensor.device.type != "cpu":
        raise ConfigError(f"{spec.name} is on {tensor.device}; this channel moves CPU memory only")
    if not tensor.is_contiguous():
        raise ConfigError(f"{spec.name} is a strided view; register the contiguous tensor")
    return tensor


def _narrowed(region: Region, cut: Cut) -> Region:
    if region.kind is not Kind.KV:
        return replace(region, cut=cut)
    (at, width), = cut
    return replace(region, cut=((at * 2 * region.rows, width * 2 * region.rows),))


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
