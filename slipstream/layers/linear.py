"""Linear layers cut among the tensor ranks of a stage, and parameters that know which part of the disk's tensor they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers.parallel import Communicator
from slipstream.sharding import Shard, heads_of


@dataclass(frozen=True)
class Cut:
    """The part of one axis that a rank holds: `ranges`, in order and apart from each other, of `whole` places."""

    whole: int
    ranges: tuple[range, ...]

    @classmethod
    def heads(cls, count: int, shard: Shard, size: int = 1) -> Cut:
        """The rank's own of `count` heads of `size` channels each; heads that are too few for the ranks are replicated."""
        assert count % shard.tp == 0 or shard.tp % count == 0, "sharding.plan refuses such a geometry"
        own = heads_of(count, shard.tp, shard.tp_rank)
        return cls(count * size, (range(own.start * size, own.stop * size),))

    @classmethod
    def all(cls, count: int) -> Cut:
        """Every rank has all of it."""
        return cls(count, (range(count),))

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __add__(self, other: Cut) -> Cut:
        """Two segments that lie one after the other on disk, each cut by itself."""
        behind = tuple(range(self.whole + part.start, self.whole + part.stop) for part in other.ranges)
        return Cut(self.whole + other.whole, self.ranges + behind)

    def parameter(self, *others: int, axis: int = 0) -> Part:
        """An empty parameter: this part along `axis`, the `others` along the other axes."""
        made = Part(torch.empty(*others[:axis], len(self), *others[axis:]), requires_grad=False)
        made.cut, made.axis = self, axis
        return made


class Part(nn.Parameter):
    """A parameter that takes only a part of its tensor on disk."""

    cut: Cut
    axis: int

    def piece(self) -> Piece:
        """Its tensor on disk, which fills it."""
        shape = list(self.shape)
        shape[self.axis] = self.cut.whole
        return Piece(tuple(shape), self.cut, self.axis)


@dataclass(frozen=True)
class Piece:
    """A tensor on disk, and the place of a parameter that it fills."""

    shape: tuple[int, ...]
    """On disk."""
    cut: Cut | None = None
    """What is read of it along `axis`; None: all."""
    axis: int = 0
    place: tuple[int | slice, ...] = ()
    """Empty: the parameter has no other pieces."""
    transposed: bool = False
    """The last two axes lie in the other order on disk; `shape` and `axis` are those of the disk."""


class Stack(Part):
    """Matrices of all experts in one, [experts, ...]; on disk one tensor too, perhaps with each matrix transposed, or a matrix
    for each expert and projection."""

    experts: Cut
    """Those that the rank holds; where they are not all, it has all channels of them."""
    projections: dict[str, Cut]
    """In the order in which they are joined along `joint`."""
    joint: int

    @classmethod
    def empty(cls, experts: Cut, hidden: int, joint: int, projections: dict[str, Cut]) -> Stack:
        """`hidden`: size of the third axis; the rank's parts of the projections are joined along axis `joint`, 1 or 2."""
        first, *others = projections.values()
        channels = sum(others, first)
        sides = (len(channels), hidden) if joint == 1 else (hidden, len(channels))
        made = cls(torch.empty(len(experts), *sides), requires_grad=False)
        made.cut, made.axis = (channels, joint) if len(experts) == experts.whole else (experts, 0)
        made.experts, made.projections, made.joint = experts, projections, joint
        return made

    def transposed(self) -> Piece:
        """Its tensor on disk where inputs come before outputs (Qwen3-VL-MoE)."""
        experts, *matrix = self.piece().shape
        return Piece((experts, *reversed(matrix)), self.cut, 3 - self.axis if self.axis else 0, transposed=True)

    def pieces(self, stem: str) -> dict[str, Piece]:
        """The separate matrices by their names on disk; `stem`: of the module that holds the experts."""
        found = {}
        axis = self.joint - 1
        for place, expert in enumerate(expert for own in self.experts.ranges for expert in own):
            start, shape = 0, list(self.shape[1:])
            for name, cut in self.projections.items():
                shape[axis] = cut.whole
                rows = (slice(None),) * axis + (slice(start, start + len(cut)),)
                found[f"{stem}.{expert}.{name}.weight"] = Piece(tuple(shape), cut, axis, (place, *rows))
                start += len(cut)
        return found


class ColumnLinear(nn.Module):
    """Each rank computes its own part of the outputs."""

    def __init__(self, inputs: int, outputs: Cut, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = outputs.parameter(inputs)
        self.bias = outputs.parameter() if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., this rank's outputs]."""
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """Each rank multiplies its own part of the inputs; the sum over the ranks is the output."""

    def __init__(self, inputs: Cut, outputs: int, comm: Communicator, *, bias: bool = False) -> None:
        super().__init__()
        self.comm = comm
        self.weight = inputs.parameter(outputs, axis=1)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's inputs] -> [..., outputs], equal on every rank."""
        return self.comm.all_reduce(self.summand(x))

    def summand(self, x: Tensor) -> Tensor:
        """What this rank adds to the sum."""
        return F.linear(x, self.weight, self.bias if self.comm.shard.tp_rank == 0 else None)
