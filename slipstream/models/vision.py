"""The vision tower of Qwen3-VL and Qwen3.5, and what other towers share with it: pixels to embeddings; knows no text.

Patches are ordered merge block by merge block: (rows / m, columns / m, m, m), so that every m*m consecutive patches become
one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.checkpoint import ImageConfig, VisionConfig
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.embedding import empty_embedding

EPS = 1e-6
ROPE_THETA = 10000.0


class PatchEmbed(nn.Module):
    """A convolution whose stride is its kernel, so a linear map of the flattened patch."""

    def __init__(self, config: VisionConfig, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size,
                              (config.temporal_patch_size, config.patch_size, config.patch_size), bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, C * t * p * p] -> [patches, hidden]."""
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Full attention inside each image, or each window of one."""

    def __init__(self, config: VisionConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        """x [patches of all images, hidden]; lengths: patches of each image or window, one after the other."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = (self.kernels.rotary(x.float(), *rope).to(v.dtype) for x in (q, k))
        parts = zip(*(torch.split(x.transpose(0, 1)[None], list(lengths), 2) for x in (q, k, v)), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], 2)  # [1, heads, patches, head]
        result: Tensor = self.proj(out[0].transpose(0, 1).flatten(1))
        return result


class VisionMLP(nn.Module):
    """fc2(gelu_tanh(fc1))."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] -> the same."""
        result: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return result


class VisionBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: VisionConfig, kernels: Kernels, norm: Callable[[], nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.attn = VisionAttention(config, kernels)
        self.mlp = mlp

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], lengths: Sequence[int]) -> Tensor:
        """[patches, hidden] -> the same."""
        x = x + self.attn(self.norm1(x), rope, lengths)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class PatchMerger(nn.Module):
    """m*m neighbouring patches -> one embedding of the language model. `joined`: they are normed together (deepstack)."""

    def __init__(self, config: VisionConfig, *, joined: bool = False) -> None:
        super().__init__()
        wide = config.hidden_size * config.merge_size**2
        self.norm = nn.LayerNorm(wide if joined else config.hidden_size, eps=EPS)
        self.linear_fc1 = nn.Linear(wide, wide)
        self.linear_fc2 = nn.Linear(wide, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] -> [patches / (m*m), out_hidden]."""
        wide = self.norm(x.reshape(-1, *self.norm.normalized_shape)).reshape(-1, self.linear_fc1.in_features)
        result: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(wide)))
        return result


class Patches(nn.Module):
    """Cuts images into patches, and says where they lie. Has no weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: VisionConfig, image: ImageConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.tensor(image.mean, device="cpu"), persistent=False)
        self.register_buffer("std", torch.tensor(image.std, device="cpu"), persistent=False)

    def grids(self, pixels: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int]]:
        """Rows and columns of patches of each image."""
        return [(image.shape[0] // self.config.patch_size, image.shape[1] // self.config.patch_size) for image in pixels]

    def forward(self, pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
        """[patches of all images, C * t * p * p] float32."""
        return torch.cat([self._one(image) for image in pixels])

    def _one(self, image: NDArray[np.uint8]) -> Tensor:
        """[patches, C * t * p * p]; a still image fills the temporal patch with copies of itself."""
        p, m, t = self.config.patch_size, self.config.merge_size, self.config.temporal_patch_size
        x = torch.tensor(image, device=self.mean.device).float() / 255.0
        x = ((x - self.mean) / self.std).permute(2, 0, 1)
        rows, columns = image.shape[0] // p, image.shape[1] // p
        x = x.reshape(3, rows // m, m, p, columns // m, m, p).permute(1, 4, 2, 5, 0, 3, 6)
        return x[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, t, -1, -1).reshape(rows * columns, -1)

    def places(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Row and column of each patch in merge-block order."""
        m = self.config.merge_size
        grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        grid = grid.reshape(2, rows // m, m, columns // m, m).permute(0, 1, 3, 2, 4).reshape(2, -1)
        return grid[0], grid[1]

    def angles(self, rows: int, columns: int) -> Tensor:
        """Axial rotary: the first half of the frequencies turns with the row, the second with the column. [patches, head]."""
        size = self.config.hidden_size // self.config.num_heads // 2
        frequencies = 1.0 / ROPE_THETA ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        row, column = self.places(rows, columns)
        angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), -1)
        return torch.cat((angles, angles), -1).to(self.mean.device)


class VisionTower(nn.Module):
    """Images of any sizes at once; each attends only to itself."""

    def __init__(self, config: VisionConfig, image: ImageConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.patches = Patches(config, image)
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = empty_embedding(config.num_position_embeddings, config.hidden_size)
        norm = partial(nn.LayerNorm, config.hidden_size, eps=EPS)
        self.blocks = nn.ModuleList(VisionBlock(config, kernels, norm, VisionMLP(config)) for _ in range(config.depth))
        self.merger = PatchMerger(config)
        self.deepstack_merger_list = nn.ModuleList(PatchMerger(config, joined=True) for _ in config.deepstack)

    def forward(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """uint8 [H, W, 3] images, sides multiples of patch * merge -> one [tokens, (1 + deepstack) * out_hidden] each:
        the embedding, then the features that are added after the language model's first layers."""
        if not pixels:
            return []
        config, weight = self.config, self.pos_embed.weight
        grids = self.patches.grids(pixels)
        x = self.patch_embed(self.patches(pixels).to(weight.dtype))
        x = x + torch.cat([self._position_embedding(*grid) for grid in grids])
        angles = torch.cat([self.patches.angles(*grid) for grid in grids])
        rope = (angles.cos(), angles.sin())
        lengths = [h * w for h, w in grids]
        features, mergers = [], iter(self.deepstack_merger_list)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, lengths)
            if i in config.deepstack:
                features.append(next(mergers)(x))
        return list(torch.split(torch.cat([self.merger(x), *features], -1), [n // config.merge_size**2 for n in lengths]))

    def _position_embedding(self, rows: int, columns: int) -> Tensor:
        """The learned square table, bilinearly stretched over the image (corners on corners). [patches, hidden]."""
        side = int(self.config.num_position_embeddings**0.5)
        table = self.pos_embed.weight.view(side, side, -1)
        row, column = self.patches.places(rows, columns)
        y, x = row * ((side - 1) / max(rows - 1, 1)), column * ((side - 1) / max(columns - 1, 1))
        top, left = y.floor().long().clamp(max=side - 1), x.floor().long().clamp(max=side - 1)
        bottom, right = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
        dy, dx = (y - top)[:, None].to(table.device, table.dtype), (x - left)[:, None].to(table.device, table.dtype)
        upper = table[top, left] * (1 - dx) + table[top, right] * dx
        lower = table[bottom, left] * (1 - dx) + table[bottom, right] * dx
        return upper * (1 - dy) + lower * dy
