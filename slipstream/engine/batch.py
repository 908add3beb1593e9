"""Turns the chunks of a step into the arrays that every rank is told, and those into the batch that a model takes; knows no
schedule and no pool.

T tokens of the step, S entries, B longest block table, P tokens per block, R rows that sample, M image rows, E channels of an
image embedding with its deepstack features. A chunk that leaves a snapshot on its way is two entries or more: each goes on from
the state that the one before it left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.budget import Chunk
from slipstream.engine.prompt import Prompt
from slipstream.layers.batch import ForwardBatch
from slipstream.types import RequestId

Array = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInput:
    """What one step computes, but for the embeddings of its image rows. All arrays are int32."""

    token_ids: Array
    """[T]."""
    positions: Array
    """[T, 3]."""
    query_lens: Array
    """[S]."""
    context_lens: Array
    """[S]."""
    block_tables: Array
    """[S, B]."""
    state_sources: Array
    """[S] slots that are read."""
    state_slots: Array
    """[S] slots that are written."""
    follows: Array
    """[S] 1: it goes on where the entry before it ends."""
    logit_rows: Array
    """[R]."""
    visual_rows: Array
    """[M]."""
    copies: Array
    """[C, 2] source and target slots of states that are copied once all is computed."""

    def on(self, device: torch.device, block_size: int, visual_embeds: torch.Tensor | None) -> ForwardBatch:
        """The batch; `visual_embeds` [M, E] if there are image rows and this rank embeds tokens."""
        entries = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        begins = np.cumsum(self.query_lens) - self.query_lens
        at = np.arange(len(self.token_ids)) + (self.context_lens - begins)[entries]
        slots = self.block_tables[entries, at // block_size].astype(np.int64) * block_size + at % block_size

        def indices(array: NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        return ForwardBatch(
            token_ids=indices(self.token_ids), positions=torch.from_numpy(self.positions).to(device),
            query_lens=tuple(self.query_lens.tolist()), context_lens=tuple(self.context_lens.tolist()),
            block_tables=torch.from_numpy(self.block_tables).to(device), slot_mapping=indices(slots),
            state_slots=indices(self.state_slots), state_sources=indices(self.state_sources),
            logit_rows=indices(self.logit_rows), visual_embeds=visual_embeds,
            visual_rows=indices(self.visual_rows) if len(self.visual_rows) else None,
            follows=tuple(bool(one) for one in self.follows))


def build(chunks: Sequence[Chunk], prompts: Mapping[RequestId, Prompt], block_size: int
          ) -> tuple[StepInput, torch.Tensor | None]:
    """The input of at least one chunk, and [M, E] slices of its prompts' image embeddings, which exist by now."""
    tokens: list[NDArray[np.integer]] = []
    positions: list[Array] = []
    visual_rows: list[NDArray[np.integer]] = []
    visual_embeds: list[torch.Tensor] = []
    logit_rows: list[int] = []
    entries: list[tuple[int, int, int, int, int]] = []  # chunk, start, end, slot read, slot written
    tables = np.zeros((len(chunks), max(-(-chunk.end // block_size) for chunk in chunks)), dtype=np.int32)
    row = 0
    for c, chunk in enumerate(chunks):
        prompt = prompts[chunk.sequence.id]
        used = -(-chunk.end // block_size)
        tables[c, :used] = chunk.sequence.blocks[:used]
        entries += [(c, *entry) for entry in _entries(chunk)]
        if prompt.tokens is None or prompt.positions is None:  # decoding
            tokens.append(np.asarray(chunk.tokens))
            positions.append(np.full((1, 3), chunk.start + prompt.mrope.delta, dtype=np.int32))
        else:
            tokens.append(prompt.tokens[chunk.start : chunk.end])
            positions.append(prompt.positions[chunk.start : chunk.end])
            first, last = prompt.image_range(chunk.start, chunk.count)
            if prompt.image_rows is not None and first < last:
                visual_rows.append(prompt.image_rows[first:last] - chunk.start + row)
                visual_embeds.append(prompt.embeddings(first, last))
        row += chunk.count
        if chunk.samples:
            logit_rows.append(row - 1)
    columns = np.asarray(entries, dtype=np.int32)
    step = StepInput(
        token_ids=np.concatenate(tokens).astype(np.int32), positions=np.concatenate(positions),
        query_lens=columns[:, 2] - columns[:, 1], context_lens=columns[:, 1].copy(), block_tables=tables[columns[:, 0]],
        state_sources=columns[:, 3].copy(), state_slots=columns[:, 4].copy(), logit_rows=np.asarray(logit_rows, dtype=np.int32),
        visual_rows=np.concatenate([np.zeros(0, dtype=np.int32), *visual_rows]).astype(np.int32),
        follows=np.concatenate([[0], columns[1:, 0] == columns[:-1, 0]]).astype(np.int32),
        copies=np.asarray([copy for chunk in chunks for copy in _copies(chunk)], dtype=np.int32).reshape(-1, 2))
    return step, torch.cat(visual_embeds) if visual_embeds else None


def _entries(chunk: Chunk) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, slot read, slot written) of a chunk's entries; the last one writes the sequence's own slot."""
    own = chunk.sequence.state_slot or 0
    start, source = chunk.start, own
    for length, slot in chunk.snapshots:
        if length < chunk.end:
            yield start, length, source, slot
            start, source = length, slot
    yield start, chunk.end, source, own


def _copies(chunk: Chunk) -> Iterator[tuple[int, int]]:
    """A snapshot at the very end of a chunk is a copy of the sequence's own slot."""
    if chunk.sequence.state_slot is not None:
        yield from ((chunk.sequence.state_slot, slot) for length, slot in chunk.snapshots if length == chunk.end)
