"""Rotary tables for one- and three-axis positions; knows no attention."""

from __future__ import annotations

import math

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
        self.attention = config.scaling.attention if config.scaling is not None else 1.0
        self.register_buffer("frequencies", frequencies(config), persistent=False)
        axes = rotary_axes(config.mrope_section, config.mrope_interleaved) if config.mrope_section else [0] * (size // 2)
        self.register_buffer("axes", torch.tensor(axes, device="cpu"), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Angles are computed in float32 from the positions themselves: no table that a long context could outgrow."""
        angles = positions.float()[:, self.axes] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self.attention).to(dtype), (angles.sin() * self.attention).to(dtype)


def frequencies(config: RopeConfig) -> Tensor:
    """[R / 2] radians a position, float32, on the CPU; scaled as the checkpoint says."""
    size, scaling = config.rotary_size, config.scaling
    with torch.device("cpu"):
        plain = 1.0 / config.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        if scaling is None or scaling.kind == "linear":
            return plain / (scaling.factor if scaling is not None else 1.0)
        if scaling.kind == "llama3":
            turns = scaling.original_context * plain / (2 * math.pi)
            kept = ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
            return kept * plain + (1 - kept) * plain / scaling.factor
        first, last = (size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))
                       for turns in (scaling.fast, scaling.slow))  # YaRN: the frequencies that make so many turns
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        slow = ((torch.arange(size // 2) - first) / (last - first or 0.001)).clamp(0, 1)
        return slow * plain / scaling.factor + (1 - slow) * plain
