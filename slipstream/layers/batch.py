"""What one forward pass works on: the ragged batch and the per-layer caches; knows no sequence and no scheduler.

Shape legend: T tokens of the step, S sequences, B longest block table, N blocks of the pool, P tokens per block,
H KV heads, D head size, Z state slots, C conv channels, W conv width, V value heads, K/E key/value head size; in Split, E
sequences that decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Split:
    """A batch by what is done with its sequences: prompt chunks go one by one, and before the E that decode, one token each."""

    chunks: tuple[tuple[int, slice], ...]
    """(sequence, its rows of T)."""
    decoding: Tensor
    """[E] int64 sequences."""
    decode_rows: Tensor
    """[E] int64 rows of T."""
    decode_lengths: Tensor
    """[E] int64 tokens, the new one included."""
    waves: tuple[Tensor, ...]
    """int64 indices into the E, all of them: those of a wave go on from states of the wave before, or from ones before that."""


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """Ragged batch: the tokens of S sequences one after the other; a decode step is a sequence with one token.

    One prompt may be several sequences, each the continuation of the one before it.
    """

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T, 3] int32: t, h, w."""
    before: Tensor | None = None
    """[T, 3] int32: positions of the tokens before; any of a first token's. For a layer that drafts."""
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
    scored: int = 0
    """The last so many of `logit_rows` are rows of prompts: their logits are handed out in pieces, never all at once."""
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
        that a chunk follows, as that needs its state first."""
        total = len(self.query_lens)
        follows = self.follows or (False,) * total
        decodes = [count == 1 and context > 0 for count, context in zip(self.query_lens, self.context_lens, strict=True)]
        for sequence in range(total - 2, -1, -1):
            decodes[sequence] &= decodes[sequence + 1] or not follows[sequence + 1]
        chunks, row, wave = [], 0, 0
        decoding: list[int] = []
        rows: list[int] = []
        waves: list[list[int]] = []
        for sequence, count in enumerate(self.query_lens):
            if decodes[sequence]:
                wave = wave + 1 if follows[sequence] and decodes[sequence - 1] else 0
                if wave == len(waves):
                    waves.append([])
                waves[wave].append(len(decoding))
                decoding.append(sequence)
                rows.append(row)
            else:
                chunks.append((sequence, slice(row, row + count)))
            row += count

        def indices(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.token_ids.device)

        return Split(chunks=tuple(chunks), decoding=indices(decoding), decode_rows=indices(rows),
                     decode_lengths=indices([self.context_lens[sequence] + 1 for sequence in decoding]),
                     waves=tuple(map(indices, waves)))


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


@dataclass(frozen=True, kw_only=True)
class DraftCache(AttentionCache):
    """Of the layer that drafts: row j is of token j beside the model's output for token j - 1; nothing attends to row 0."""

    hidden: Tensor
    """[Z, hidden] model dtype: the output (after the final norm) for the sequence's last token."""


LayerCache = AttentionCache | LinearCache
"""A DraftCache is an AttentionCache too."""
