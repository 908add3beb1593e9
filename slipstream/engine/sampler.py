"""Draws tokens from logits; knows no sequence. Randomness is a function of its arguments: nothing here keeps a state.

A row's logits pass bias, barred tokens, repetition, then frequency and presence penalty, temperature, min_p, top_k and top_p,
in this order, each of the last two on what the one before it left. R rows, V vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from slipstream.types import Logprobs, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Which token is drawn: output `index` of `choice`, and how."""

    params: SamplingParams
    choice: int
    index: int
    barred: frozenset[int] = frozenset()
    """Tokens that it may not be; ids outside of the vocabulary are no harm."""
    allowed: bytes | None = None
    """A bit for each token that it may be, the lowest of the first byte for token 0; None: all of them."""
    prompt: Tensor | None = None
    """int64, the prompt's tokens on the logits' device; needed for a repetition penalty."""
    outputs: Sequence[int] = ()
    """The choice's tokens so far; needed for penalties."""

    @property
    def plain(self) -> bool:
        """True if the logits are taken as the model made them."""
        params = self.params
        return not (self.barred or self.allowed is not None or params.logit_bias or params.presence_penalty
                    or params.frequency_penalty or params.repetition_penalty != 1)


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
        if tokens[row] is None or (draw.plain and draw.params.temperature == 0):
            continue
        logits_V = logits_RV[row] if draw.plain else _adjust(logits_RV[row], draw)
        if not draw.plain and not bool(torch.isfinite(logits_V.max())):
            tokens[row] = None
        elif draw.params.temperature == 0:
            tokens[row] = int(logits_V.argmax())
        else:
            tokens[row] = _draw(logits_V, draw.params, uniform(draw.params.seed, draw.choice, draw.index))
    return tokens


def logprobs(logits_RV: Tensor, draws: Sequence[Draw], tokens: Sequence[int | None]) -> list[Logprobs | None]:
    """Of the tokens drawn from these rows; None where the draw asks for none, or no token was drawn."""
    found: list[Logprobs | None] = [None] * len(draws)
    for row, (draw, token) in enumerate(zip(draws, tokens, strict=True)):
        wanted = draw.params.logprobs
        if wanted is None or token is None:
            continue
        values_V = torch.log_softmax(logits_RV[row].float(), dim=-1)
        best, ids = values_V.topk(min(wanted, len(values_V)))
        found[row] = Logprobs(logprob=float(values_V[token]), top=tuple(zip(ids.tolist(), best.tolist(), strict=True)))
    return found


def _adjust(logits_V: Tensor, draw: Draw) -> Tensor:
    """A copy with bias, barred tokens and penalties."""
    params, size, device = draw.params, len(logits_V), logits_V.device
    logits_V = logits_V.clone()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits_V[torch.tensor(ids, device=device)] += torch.tensor(biases, dtype=logits_V.dtype, device=device)
    if barred := [token for token in draw.barred if token < size]:
        logits_V[torch.tensor(barred, device=device)] = -torch.inf
    if draw.allowed is not None:
        bits = torch.from_numpy(np.unpackbits(np.frombuffer(draw.allowed, dtype=np.uint8), count=size, bitorder="little"))
        logits_V[~bits.to(device, torch.bool)] = -torch.inf
    outputs = torch.tensor(draw.outputs, dtype=torch.int64, device=device)
    if params.repetition_penalty != 1:
        assert draw.prompt is not None, "a repetition penalty needs the prompt"
        seen = torch.cat((draw.prompt, outputs))  # a token that is there twice is written twice, with the same value
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if len(outputs) and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.unique(outputs, return_counts=True)
        logits_V[ids] -= counts * params.frequency_penalty + params.presence_penalty
    return logits_V


def _draw(logits_V: Tensor, params: SamplingParams, point: float) -> int:
    """Inverse CDF over what min_p, top_k and top_p keep, most probable token first.

    Of tokens of the same probability at the edge of top_k or top_p those of lower id are kept. top_p keeps the tokens up to
    and with the one that brings their mass to it.
    """
    # The maximum is taken off before the division, so that no temperature, however small, makes an infinity of it.
    scaled = (logits_V.double() - logits_V.max().double()) / params.temperature
    order = torch.argsort(scaled, descending=True, stable=True)
    scaled = scaled[order]
    kept = len(scaled) if params.min_p == 0 else int((scaled >= math.log(params.min_p)).sum())
    kept = min(kept, params.top_k or kept)
    mass = torch.softmax(scaled[:kept], dim=-1).cumsum(dim=-1)
    kept = min(int(torch.searchsorted(mass, params.top_p)) + 1, kept)
    target = point * float(mass[kept - 1])
    return int(order[min(int(torch.searchsorted(mass, target, right=True)), kept - 1)])
