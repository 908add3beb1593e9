"""Which bytes a destination rank reads from which source rank, for any two geometries of one layout. Pure.

A rank that needs a head reads it from exactly one rank that holds it. Where the source replicates heads, a head's readers
are spread over its holders in rank order, so that ranks of equal geometries pair up. Rank 0 always reads from rank 0: both hold
the first layer's first head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from cache_transfer.layout import CacheLayout, Cut, TensorSpec
from slipstream.errors import IncompatibleError
from slipstream.sharding import MAX_TP, Geometry, Shard, heads_of


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What one stream carries of one tensor."""

    spec: TensorSpec
    """As the stream counts it: a unit has the bytes of the heads that this copy carries."""
    parts: tuple[tuple[int, int, int], ...]
    """(at the source, at the destination, bytes), in the order of the wire: offsets into what each of the two ranks keeps of
    one token's keys (the same again for its values), or into its slot of a state."""

    @property
    def at_source(self) -> Cut:
        """What the source sees."""
        return tuple((there, size) for there, _, size in self.parts)

    @property
    def at_destination(self) -> Cut:
        """What the destination sees."""
        return tuple((here, size) for _, here, size in self.parts)


@lru_cache(maxsize=1024)
def plan(layout: CacheLayout, source: Geometry, to: Shard) -> dict[int, tuple[Copy, ...]]:
    """By source rank, what the rank `to` reads from it: together each byte of its tensors once. Both passed `check`."""
    found: dict[int, list[Copy]] = {}
    for spec in layout.tensors:
        if spec.layer not in to.layers:
            continue
        first = source.stage_of(spec.layer) * source.tp
        for tp_rank, parts in _parts(spec, source.tp, to).items():
            carried = replace(spec, runs=tuple((1, size) for _, _, size in parts))
            found.setdefault(first + tp_rank, []).append(Copy(spec=carried, parts=tuple(parts)))
    return {rank: tuple(copies) for rank, copies in sorted(found.items())}


@lru_cache(maxsize=256)
def readers(layout: CacheLayout, source: Shard, to: Geometry) -> frozenset[int]:
    """The ranks of a destination that read from this source rank."""
    return frozenset(rank for rank in range(to.world)
                     if source.rank in plan(layout, source.geometry, Shard(geometry=to, rank=rank)))


def check(layout: CacheLayout, shard: Shard) -> None:
    """Raise IncompatibleError unless the layout can be cut like this and has such a rank."""
    geometry = shard.geometry
    if not geometry.stages or min(geometry.stages) < 1 or sum(geometry.stages) != len(layout.layers):
        raise IncompatibleError(f"stages {list(geometry.stages)} are not the model's {len(layout.layers)} layers")
    if not 1 <= geometry.tp <= MAX_TP:
        raise IncompatibleError(f"tp {geometry.tp} is not 1 to {MAX_TP}")
    for spec in layout.tensors:
        for heads, _ in spec.runs:
            if heads % geometry.tp and geometry.tp % heads:
                raise IncompatibleError(f"tp {geometry.tp} does not cut the {heads} heads of {spec.name} evenly")
    if not 0 <= shard.rank < geometry.world:
        raise IncompatibleError(f"there is no rank {shard.rank} in tp {geometry.tp}, pp {geometry.pp}")


def _parts(spec: TensorSpec, source_tp: int, to: Shard) -> dict[int, list[tuple[int, int, int]]]:
    """A tensor's parts by the source's tensor rank; neighbours on both sides are one part."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    there_base = here_base = 0
    for heads, size in spec.runs:
        here = heads_of(heads, to.tp, to.tp_rank)
        for head in here:
            holder = _holder(head, heads, source_tp, to)
            there = there_base + (head - heads_of(heads, source_tp, holder).start) * size
            at = here_base + (head - here.start) * size
            parts = found.setdefault(holder, [])
            if parts and (parts[-1][0] + parts[-1][2], parts[-1][1] + parts[-1][2]) == (there, at):
                parts[-1] = (parts[-1][0], parts[-1][1], parts[-1][2] + size)
            else:
                parts.append((there, at, size))
        there_base += len(heads_of(heads, source_tp, 0)) * size
        here_base += len(here) * size
    return found


def _holder(head: int, heads: int, source_tp: int, to: Shard) -> int:
    """The source's tensor rank that the rank `to` reads a head from."""
    if source_tp <= heads:
        return head // (heads // source_tp)
    holders, among = source_tp // heads, max(1, to.tp // heads)  # ranks that hold the head, and ranks that read it
    return head * holders + to.tp_rank % among * holders // among
