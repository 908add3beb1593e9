"""SwiGLU; knows no routing."""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.kernels.dispatch import Kernels
from slipstream.layers.linear import ColumnLinear, Cut, RowLinear
from slipstream.layers.parallel import Communicator


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, kernels: Kernels, hidden: int, intermediate: int, comm: Communicator) -> None:
        super().__init__()
        self.kernels, self.comm = kernels, comm
        channels = Cut.heads(intermediate, comm.shard)
        self.gate_proj = ColumnLinear(hidden, channels)
        self.up_proj = ColumnLinear(hidden, channels)
        self.down_proj = RowLinear(channels, hidden, comm)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> the same."""
        return self.comm.all_reduce(self.summand(x))

    def summand(self, x: Tensor) -> Tensor:
        """What this rank adds to the sum."""
        return self.down_proj.summand(self.kernels.silu_mul(self.gate_proj(x), self.up_proj(x)))
