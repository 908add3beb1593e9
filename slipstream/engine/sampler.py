"""Draws tokens from logits; knows no sequence. Randomness is a function of its arguments: nothing here keeps a state.

R rows, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from slipstream.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Which token is drawn: output `index` of `choice`, and how."""

    params: SamplingParams
    choice: int
    index: int


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1), the same in every process for the same three numbers, and independent for different ones."""
    mask = (1 << 64) - 1
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed & mask, choice & mask, index & mask))
    return (digest >> 11) * 2.0**-53


def sample(logits_RV: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One token per row of float32 logits; None for a row that holds a NaN or has no finite maximum.

    Each row is worked on by itself, so that a token does not depend on which other rows are in the batch.
    """
    assert logits_RV.shape[0] == len(draws), "one draw per row"
    best, greedy = logits_RV.max(dim=-1)  # a NaN anywhere in the row is its maximum
    tokens: list[int | None] = [
        token if good else None for token, good in zip(greedy.tolist(), torch.isfinite(best).tolist(), strict=True)
    ]
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0 and tokens[row] is not None:
            tokens[row] = _draw(logits_RV[row], draw.params, uniform(draw.params.seed, draw.choice, draw.index))
    return tokens


def _draw(logits_V: Tensor, params: SamplingParams, point: float) -> int:
    """Inverse CDF over the nucleus: the most probable tokens, up to and with the one that brings their mass to top_p."""
    # The maximum is taken off before the division, so that no temperature, however small, makes an infinity of it.
    scaled = (logits_V.double() - logits_V.max().double()) / params.temperature
    order = torch.argsort(scaled, descending=True, stable=True)
    mass = torch.softmax(scaled, dim=-1)[order].cumsum(dim=-1)
    kept = min(int(torch.searchsorted(mass, params.top_p)) + 1, len(mass))
    target = point * float(mass[kept - 1])
    return int(order[min(int(torch.searchsorted(mass, target, right=True)), kept - 1)])
