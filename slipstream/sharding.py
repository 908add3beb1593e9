"""Which part of a model each rank of a replica holds: heads by tensor parallelism, layers by pipeline parallelism. Pure.

Rank `r` of a replica of TP t is tensor rank `r % t` of stage `r // t`: the ranks of a stage are neighbours. A tensor that has
fewer heads than there are tensor ranks is replicated on neighbours, `head = rank // (ranks // heads)`, never modulo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.checkpoint import Checkpoint
from slipstream.errors import ConfigError
from slipstream.types import AttentionLayer, LayerSpec

MAX_TP = 64


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a replica is cut."""

    tp: int = 1
    """Tensor ranks of each stage."""
    stages: tuple[int, ...]
    """Layers of each pipeline stage, in order; a layer that drafts is one of the last stage's."""
    expert_parallel: bool = False
    """Each tensor rank holds its own of the routed experts, whole, instead of its own channels of every expert."""

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.stages)

    @property
    def world(self) -> int:
        """Ranks of the replica."""
        return self.tp * self.pp

    def layers_of(self, stage: int) -> range:
        """Indices of a stage's layers in the checkpoint's list."""
        first = sum(self.stages[:stage])
        return range(first, first + self.stages[stage])

    def stage_of(self, layer: int) -> int:
        """The stage that holds a layer."""
        return next(stage for stage in range(self.pp) if layer in self.layers_of(stage))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's place in its replica."""

    geometry: Geometry
    rank: int = 0

    @property
    def tp(self) -> int:
        """Tensor ranks of its stage."""
        return self.geometry.tp

    @property
    def tp_rank(self) -> int:
        """Its number among them."""
        return self.rank % self.geometry.tp

    @property
    def stage(self) -> int:
        """Its pipeline stage."""
        return self.rank // self.geometry.tp

    @property
    def first(self) -> bool:
        """True on the stage that holds the embedding and the vision tower."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True on the stage that holds the final norm and the head."""
        return self.stage == self.geometry.pp - 1

    @property
    def layers(self) -> range:
        """Indices of its layers in the checkpoint's list."""
        return self.geometry.layers_of(self.stage)

    def specs(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """What it holds of the checkpoint's `layers`, with this rank's own numbers of heads."""
        return tuple(local_spec(layers[index], self.tp, self.tp_rank) for index in self.layers)


def visual_levels(checkpoint: Checkpoint, shard: Shard | None) -> int:
    """Vectors that a rank's stage is given of an image row: the deepstack features for its own layers and for those of later
    stages; on the first stage beside the embedding, on the others behind it where the last stage drafts. `shard` None: of the
    only rank."""
    features = checkpoint.vision.deepstack if checkpoint.vision is not None else ()
    left = max(0, len(features) - (shard.layers.start if shard is not None else 0))
    return left + (checkpoint.draft is not None and shard is not None and not shard.first)


def heads_of(heads: int, tp: int, tp_rank: int) -> range:
    """The heads of a tensor rank. `heads` divides `tp`, or `tp` divides `heads`."""
    if tp <= heads:
        each = heads // tp
        return range(tp_rank * each, (tp_rank + 1) * each)
    head = tp_rank // (tp // heads)
    return range(head, head + 1)


def rows_of(rows: int, tp: int, tp_rank: int) -> range:
    """A tensor rank's part of rows that need not divide evenly, such as a vocabulary; the last parts may be short or empty."""
    each = -(-rows // tp)
    return range(min(rows, tp_rank * each), min(rows, (tp_rank + 1) * each))


def local_spec(layer: LayerSpec, tp: int, tp_rank: int) -> LayerSpec:
    """A layer as one tensor rank holds it."""
    if isinstance(layer, AttentionLayer):
        return dataclasses.replace(layer, kv_heads=len(heads_of(layer.kv_heads, tp, tp_rank)))
    return dataclasses.replace(layer, key_heads=len(heads_of(layer.key_heads, tp, tp_rank)),
                               value_heads=len(heads_of(layer.value_heads, tp, tp_rank)))


def legal_tp(checkpoint: Checkpoint, *, expert_parallel: bool = False) -> list[int]:
    """Every TP of at most MAX_TP that cuts the model evenly."""
    return [tp for tp in range(1, MAX_TP + 1) if _is_legal(checkpoint, tp, expert_parallel)]


def _is_legal(checkpoint: Checkpoint, tp: int, expert_parallel: bool) -> bool:
    def split(heads: int) -> bool:
        return heads % tp == 0

    def split_or_copied(heads: int) -> bool:
        return heads % tp == 0 or tp % heads == 0

    if not (split(checkpoint.num_heads) and all(map(split, _widths(checkpoint, expert_parallel)))):
        return False
    return all(split_or_copied(layer.kv_heads) if isinstance(layer, AttentionLayer)
               else split(layer.value_heads) and split_or_copied(layer.key_heads) for layer in checkpoint.layers)


def _widths(checkpoint: Checkpoint, expert_parallel: bool) -> list[int]:
    """What TP cuts of the MLPs, besides heads: channels, or the experts themselves."""
    experts = checkpoint.experts
    if experts is None or not expert_parallel:
        return list(checkpoint.intermediate_sizes)
    return [size for size in (checkpoint.intermediate_size, experts.count, experts.shared_size) if size]


def plan(checkpoint: Checkpoint, *, tp: int, pp: int, stages: Sequence[int] = (), expert_parallel: bool = False) -> Geometry:
    """The geometry of a replica; `stages` gives the layers of each stage, empty: balanced. Raises ConfigError that lists what
    would be legal."""
    if expert_parallel and checkpoint.experts is None:
        raise ConfigError(f"expert_parallel: {checkpoint.architecture} has no experts here", field="expert_parallel")
    if not _is_legal(checkpoint, tp, expert_parallel) or tp > MAX_TP:
        legal, sizes = (", ".join(map(str, each)) for each in (legal_tp(checkpoint, expert_parallel=expert_parallel),
                                                               _widths(checkpoint, expert_parallel)))
        what = "experts and intermediate sizes" if expert_parallel else "intermediate size"
        raise ConfigError(f"tp {tp} does not cut {checkpoint.architecture} evenly ({checkpoint.num_heads} heads, {what} "
                          f"{sizes}); legal: {legal}", field="tp")
    count = checkpoint.depth
    if not 1 <= pp <= count:
        raise ConfigError(f"pp must be 1 to {count}, the number of layers, not {pp}", field="pp")
    if not stages:
        costs, head = _costs(checkpoint), checkpoint.vocab_size * checkpoint.hidden_size
        stages = balance(costs[:count], pp, last=head + sum(costs[count:]))
    if len(stages) != pp or sum(stages) != count or min(stages) < 1:
        raise ConfigError(f"stages {list(stages)} must be {pp} positive numbers of layers, {count} together", field="stages")
    stages = (*stages[:-1], stages[-1] + len(checkpoint.layers) - count)  # a layer that drafts belongs to the last one
    return Geometry(tp=tp, stages=stages, expert_parallel=expert_parallel)


def balance(costs: Sequence[int], pp: int, *, last: int = 0) -> tuple[int, ...]:
    """Lengths of `pp` runs of `costs`, none empty, whose dearest is as cheap as possible; `last` is added to the last run."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k][i]: the cheapest dearest of k runs of the first i costs, and the length of the last run
    best: list[list[tuple[int, int]]] = [[(sums[i], i) for i in range(len(sums))]]
    for runs in range(2, pp + 1):
        more = last if runs == pp else 0
        best.append([min(((max(best[-1][i - length][0], sums[i] - sums[i - length] + more), length)
                          for length in range(1, i - runs + 2)), default=(0, 0)) for i in range(len(sums))])
    lengths, end = [], len(costs)
    for row in reversed(best):
        lengths.append(row[end][1])
        end -= row[end][1]
    return tuple(reversed(lengths))


def _costs(checkpoint: Checkpoint) -> list[int]:
    """Weights that each layer multiplies a token with."""
    hidden = checkpoint.hidden_size
    found = []
    for index, layer in enumerate(checkpoint.layers):
        experts = checkpoint.experts_of(index)
        if isinstance(layer, AttentionLayer):
            mixer = 2 * (checkpoint.num_heads + layer.kv_heads) * layer.head_size
        else:
            mixer = sum(layer.conv_segments) + 2 * layer.value_heads * layer.value_head_size
        wide = checkpoint.intermediate_size
        if experts is not None:
            wide = experts.top_k * experts.intermediate_size + experts.shared_size
        found.append(hidden * (mixer + 3 * wide))
    return found
