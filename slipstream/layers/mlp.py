"""SwiGLU; knows no routing."""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.kernels.dispatch import Kernels


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, kernels: Kernels, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> the same."""
        result: Tensor = self.down_proj(self.kernels.silu_mul(self.gate_proj(x), self.up_proj(x)))
        return result
