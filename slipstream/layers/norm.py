"""RMSNorm as a module; knows no residual."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.kernels.dispatch import Kernels


class RMSNorm(nn.Module):
    """Over the last axis. `unit_offset`: the stored weight is the distance from 1 (Qwen3.5)."""

    def __init__(self, kernels: Kernels, size: int, eps: float, unit_offset: bool) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same."""
        return self.kernels.rms_norm(x, self.weight, self.eps, self.unit_offset)
