"""FP8 checkpoints out of others, and what they mean, in numpy from the raw bits: shares no arithmetic with the product."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]
Block = tuple[int, int]


def value(bits: int) -> float:
    """What a byte of e4m3fn means."""
    sign, exponent, mantissa = -1.0 if bits & 0x80 else 1.0, bits >> 3 & 0xF, bits & 7
    if bits & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


VALUES = np.array([value(bits) for bits in range(256)], dtype=np.float32)
_POSITIVE = VALUES[:127]


def spread(scales: Array, shape: tuple[int, ...], block: Block) -> Array:
    """The scale of every number of a matrix, or of each of a stack of them; a side of 0 is the whole axis."""
    rows, columns = (np.arange(size) // (side or size) for size, side in zip(shape[-2:], block, strict=True))
    return scales[..., rows, :][..., columns]


def dequantised(bits: Array, scales: Array, block: Block) -> Array:
    """Each number times its scale, in float32."""
    found: Array = VALUES[bits] * spread(scales.astype(np.float32), bits.shape, block)
    return found


def quantised(numbers: Array, block: Block, rounded: torch.dtype) -> tuple[Array, Array]:
    """(bits, scales); the largest number of a block becomes 448, as near as scales of the dtype `rounded` allow."""
    *_, n, k = numbers.shape
    high, wide = block[0] or n, block[1] or k
    scales = np.stack([np.stack([np.abs(numbers[..., i : i + high, j : j + wide]).max((-2, -1)) for j in range(0, k, wide)], -1)
                       for i in range(0, n, high)], -2) / 448 + 1e-9
    scales = torch.from_numpy(scales).to(rounded).float().numpy()
    wanted = numbers / spread(scales, numbers.shape, block)
    above = np.searchsorted(_POSITIVE, np.abs(wanted)).clip(1, 126)
    nearest = above - (np.abs(wanted) - _POSITIVE[above - 1] < _POSITIVE[above] - np.abs(wanted))
    return (nearest | np.where(wanted < 0, 0x80, 0)).astype(np.uint8), scales


PLAIN = re.compile(r"lm_head|embed_tokens|norm|visual|conv1d|in_proj_[ab]|in_proj_ba|mlp\.gate\.|shared_expert_gate")
"""What published checkpoints leave as it is."""


def convert(folder: Path, into: Path, config: dict[str, Any], block: Block, suffix: str, *, stored: torch.dtype = torch.float32,
            shape: Callable[[Tensor], Tensor] = lambda scales: scales, more: dict[str, Tensor] | None = None) -> Path:
    """Write the FP8 copy of a checkpoint into `into`; returns the folder beside it, which holds what the copy means in float32.

    `suffix` and `shape` say how scales are called and laid out; `more` is written too.
    """
    meant = into.with_name(into.name + "-meant")
    for target in (into, meant):
        shutil.copytree(folder, target)
    said = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**said, "quantization_config": config}))
    weights = load_file(folder / "model.safetensors")
    small, numbers = dict(more or {}), {}
    for name, tensor in weights.items():
        numbers[name] = small[name] = tensor
        if tensor.dim() > 1 and not PLAIN.search(name):
            bits, scales = quantised(tensor.numpy(), block, stored)
            small[name] = torch.from_numpy(bits).view(torch.float8_e4m3fn)
            small[name + suffix] = shape(torch.from_numpy(scales).to(stored)).contiguous()
            numbers[name] = torch.from_numpy(dequantised(bits, scales, block))
    save_file(small, into / "model.safetensors")
    save_file(numbers, meant / "model.safetensors", metadata={"format": "pt"})
    return meant
