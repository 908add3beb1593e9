"""FP8 numbers: e4m3fn as checkpoints and caches hold them, and the flavour of gfx942. Knows no layer and no file."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def dequantise(stored: Tensor, scales: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Each number times its scale in float32, rounded once; `scales` broadcasts."""
    return (stored.float() * scales).to(dtype)


def quantise(x: Tensor, scale: float) -> Tensor:
    """x / scale as e4m3fn; what is too large becomes the largest number there is."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def to_fnuz(stored: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3fnuz, scales) of equal products, exactly: the same bits mean half as much there, and those of e4m3fn's -0 mean NaN.

    gfx942 multiplies e4m3fnuz, gfx950 and CUDA devices e4m3fn. A backend whose kernels take FP8 weights on a gfx942 passes
    them through here; the reference has none. Raises ValueError for a NaN, whose bits would become +-240.
    """
    bits = stored.view(torch.uint8)
    if bool(((bits & 0x7F) == 0x7F).any()):
        raise ValueError("NaN has no place in e4m3fnuz")
    return bits.masked_fill(bits == 0x80, 0).view(torch.float8_e4m3fnuz), scales * 2
