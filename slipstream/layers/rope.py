"""Rotary tables for one- and three-axis positions; knows no attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.checkpoint import RopeConfig
from slipstream.kernels.reference import rotary_axes


class Rotary(nn.Module):
    """Positions [T, 3] -> (cos, sin) [T, R]. The axis belongs to the frequency pair's index, never to a lane or a head.

    Its constants are made on the CPU, also where a model is built on the meta device.
    """

    frequencies: Tensor
    axes: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        size = config.rotary_size
        frequencies = 1.0 / config.theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
        self.register_buffer("frequencies", frequencies, persistent=False)
        axes = rotary_axes(config.mrope_section, config.mrope_interleaved) if config.mrope_section else [0] * (size // 2)
        self.register_buffer("axes", torch.tensor(axes, device="cpu"), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Angles are computed in float32 from the positions themselves: no table that a long context could outgrow."""
        angles = positions.float()[:, self.axes] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)
