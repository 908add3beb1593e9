"""What one forward pass works on: the ragged batch and the per-layer caches; knows no sequence and no scheduler.

Shape legend: T tokens of the step, S sequences, B longest block table, N blocks of the pool, P tokens per block,
H KV heads, D head size, Z state slots, C conv channels, W conv width, V value heads, K/E key/value head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Split:
    """A batch by what is done with its sequences: prompt chunks go one by one, the E that decode (one token each) at once."""

    chunks: tuple[tuple[int, slice], ...]
    """(sequence, its rows of T)."""
    decoding: Tensor
    """[E] int64 sequences."""
    decode_rows: Tensor
    """[E] int64 rows of T."""
    decode_lengths: Tensor
    """[E] int64 tokens, the new one included."""


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Ragged batch: the tokens of S sequences one after the other; a decode step is a sequence with one token.

    One prompt may be several sequences, each the continuation of the one before it.
    """

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T, 3] int32: t, h, w."""
    query_lens: tuple[int, ...]
    """[S] tokens of each sequence in this step, each at least 1."""
    context_lens: tuple[int, ...]
    """[S] tokens of each sequence that the caches already hold."""
    block_tables: Tensor
    """[S, B] int32, padded with 0; covers context + query."""
    slot_mapping: Tensor
    """[T] int64: block * P + offset, where each token's keys and values go."""
    state_slots: Tensor
    """[S] int64 into the state pools (any value for a model without recurrent state)."""
    logit_rows: Tensor
    """[R] int64 rows of T whose logits are wanted."""
    visual_rows: Tensor | None = None
    """[M] int64 rows of T that take an image embedding instead of the token's, and deepstack features after layers."""
    visual_embeds: Tensor | None = None
    """[M, (1 + L) * hidden] in the order of visual_rows, on the first stage: the embedding, then L deepstack features."""
    state_sources: Tensor | None = None
    """[S] int64: the slots that the states are read from; None: those that they are written to."""
    follows: tuple[bool, ...] = ()
    """[S] True: it is the continuation of the sequence before it, and reads the slot that that one writes. Empty: none is."""

    @property
    def sources(self) -> Tensor:
        """[S] int64: the slots that the states are read from."""
        return self.state_slots if self.state_sources is None else self.state_sources

    @cached_property
    def split(self) -> Split:
        """Found once for all layers. The first token of a sequence is a chunk, as it has no state to go on from; so is one
        that another sequence follows, as that needs its state first."""
        followed = (*self.follows[1:], False) if self.follows else (False,) * len(self.query_lens)
        chunks, decoding, rows, row = [], [], [], 0
        for sequence, (count, context) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            if count == 1 and context and not followed[sequence]:
                decoding.append(sequence)
                rows.append(row)
            else:
                chunks.append((sequence, slice(row, row + count)))
            row += count

        def indices(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.token_ids.device)

        return Split(chunks=tuple(chunks), decoding=indices(decoding), decode_rows=indices(rows),
                     decode_lengths=indices([self.context_lens[sequence] + 1 for sequence in decoding]))


@dataclass(frozen=True, kw_only=True)
class AttentionCache:
    """Paged keys and values of one attention layer. A sequence's rows belong to whoever owns its blocks."""

    kv: Tensor
    """[N, H, 2, P, D], model dtype or e4m3fn: a block, and in it each head's keys and values, is one contiguous range."""


@dataclass(frozen=True, kw_only=True)
class LinearCache:
    """Conv and recurrent states of one Gated-DeltaNet layer, one slot per sequence.

    A sequence whose context_len is 0 starts from zeros whatever the slot holds.
    """

    conv: Tensor
    """[Z, C, W - 1] model dtype: the last raw (pre-convolution) columns, oldest first; channels are q | k | v."""
    recurrent: Tensor
    """[Z, V, K, E] float32."""


LayerCache = AttentionCache | LinearCache
