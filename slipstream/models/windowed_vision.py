"""The vision tower of Qwen2.5-VL, whose blocks mostly attend inside windows only, and of Qwen2-VL, which has no windows.
Positions are rotary alone. Knows no text.

Patches are put in the order of their windows, so that a window is a run of neighbours; in it they stay in merge-block order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.checkpoint import ImageConfig, VisionConfig
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.norm import RMSNorm
from slipstream.models.vision import EPS, PatchEmbed, Patches, VisionBlock


class QuickMLP(nn.Module):
    """fc2(QuickGELU(fc1)): x * sigmoid(1.702 x)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] -> the same."""
        wide = self.fc1(x)
        result: Tensor = self.fc2(wide * torch.sigmoid(1.702 * wide))
        return result


class WindowedMLP(nn.Module):
    """SwiGLU with biases."""

    def __init__(self, config: VisionConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] -> the same."""
        result: Tensor = self.down_proj(self.kernels.silu_mul(self.gate_proj(x), self.up_proj(x)))
        return result


class WindowedMerger(nn.Module):
    """m*m neighbouring patches -> one embedding of the language model."""

    def __init__(self, config: VisionConfig, norm: nn.Module) -> None:
        super().__init__()
        self.wide = config.hidden_size * config.merge_size**2
        self.ln_q = norm
        self.mlp = nn.Sequential(nn.Linear(self.wide, self.wide), nn.GELU(), nn.Linear(self.wide, config.out_hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] -> [patches / (m*m), out_hidden]."""
        result: Tensor = self.mlp(self.ln_q(x).reshape(-1, self.wide))
        return result


class WindowedTower(nn.Module):
    """Images of any sizes at once; each attends only to itself, and only in the full blocks to all of itself.

    RMSNorm and SwiGLU with windows, LayerNorm and QuickGELU without.
    """

    def __init__(self, config: VisionConfig, image: ImageConfig, kernels: Kernels) -> None:
        super().__init__()
        self.merge_size, self.windows = config.merge_size, config.windows
        self.patches = Patches(config, image)
        self.patch_embed = PatchEmbed(config, bias=False)
        norm = (partial(RMSNorm, kernels, config.hidden_size, EPS, unit_offset=False) if config.windows is not None
                else partial(nn.LayerNorm, config.hidden_size, eps=EPS))
        self.blocks = nn.ModuleList(
            VisionBlock(config, kernels, norm, QuickMLP(config) if config.windows is None else WindowedMLP(config, kernels))
            for _ in range(config.depth))
        self.merger = WindowedMerger(config, norm())

    def forward(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """uint8 [H, W, 3] images, sides multiples of patch * merge -> one [tokens, out_hidden] each."""
        if not pixels:
            return []
        x = self.patch_embed(self.patches(pixels).to(self.patch_embed.proj.weight.dtype))
        grids = self.patches.grids(pixels)
        each = self.merge_size**2
        angles: list[Tensor] = []
        order: list[Tensor] = []
        inside: list[int] = []
        tokens: list[int] = []
        for rows, columns in grids:
            own, lengths = self._windows(rows // self.merge_size, columns // self.merge_size)
            order.append(own + sum(tokens))
            inside += [length * each for length in lengths]
            tokens.append(len(own))
            angles.append(self.patches.angles(rows, columns))
        by_window = torch.cat(order).to(x.device)

        def arrange(patches: Tensor) -> Tensor:
            return patches.reshape(len(by_window), each, -1)[by_window].flatten(0, 1)

        x, turned = arrange(x), arrange(torch.cat(angles))
        rope, whole = (turned.cos(), turned.sin()), [count * each for count in tokens]
        for i, block in enumerate(self.blocks):
            x = block(x, rope, whole if self.windows is None or i in self.windows.full_blocks else inside)
        merged = self.merger(x)
        return list(torch.split(torch.empty_like(merged).index_copy(0, by_window, merged), tokens))

    def _windows(self, rows: int, columns: int) -> tuple[Tensor, list[int]]:
        """Of an image of merged patches: their order by windows, and how many each window has: fewer at the edges."""
        side = self.windows.side if self.windows is not None else max(rows, columns)
        row, column = torch.arange(rows)[:, None] // side, torch.arange(columns)[None] // side
        window = (row * -(-columns // side) + column).flatten()
        return torch.argsort(window, stable=True), torch.bincount(window).tolist()
