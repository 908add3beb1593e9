"""Turns the chunks of a step into the arrays that every rank is told, and those into the batch that a model takes; knows no
schedule and no pool.

T tokens of the step, S entries, B longest block table, P tokens per block, R rows that sample, Q rows of prompts whose next
tokens are scored, M image rows, E channels of an image embedding with its deepstack features, D sequences that draft. A chunk
that leaves a snapshot on its way is two entries or more: each goes on from the state that the one before it left. So are a
token and the drafts behind it, an entry each.
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
    before: Array
    """[T, 3] positions of the tokens before."""
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
    scored: Array
    """[Q, 3] row of T; the token after it; most probable tokens that are wanted beside it."""
    visual_rows: Array
    """[M]."""
    copies: Array
    """[C, 2] source and target slots of states that are copied once all is computed."""
    drafting: Array
    """[D, 4] first draw; first entry; entries, one more than drafts; rows behind the first that new drafts may take."""

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
            before=torch.from_numpy(self.before).to(device),
            query_lens=tuple(self.query_lens.tolist()), context_lens=tuple(self.context_lens.tolist()),
            block_tables=torch.from_numpy(self.block_tables).to(device), slot_mapping=indices(slots),
            state_slots=indices(self.state_slots), state_sources=indices(self.state_sources),
            logit_rows=indices(np.concatenate((self.logit_rows, self.scored[:, 0]))), scored=len(self.scored),
            visual_embeds=visual_embeds,
            visual_rows=indices(self.visual_rows) if len(self.visual_rows) else None,
            follows=tuple(bool(one) for one in self.follows))


def build(chunks: Sequence[Chunk], prompts: Mapping[RequestId, Prompt], block_size: int
          ) -> tuple[StepInput, torch.Tensor | None]:
    """The input of at least one chunk, and [M, E] slices of its prompts' image embeddings, which exist by now."""
    tokens: list[NDArray[np.integer]] = []
    positions: list[Array] = []
    before: list[Array] = []
    drafting: list[tuple[int, int, int, int]] = []
    visual_rows: list[NDArray[np.integer]] = []
    visual_embeds: list[torch.Tensor] = []
    logit_rows: list[int] = []
    scored: list[Array] = []
    entries: list[tuple[int, int, int, int, int]] = []  # chunk, start, end, slot read, slot written
    tables = np.zeros((len(chunks), max(-(-chunk.reach // block_size) for chunk in chunks)), dtype=np.int32)
    row = draws = 0
    for c, chunk in enumerate(chunks):
        prompt = prompts[chunk.sequence.id]
        used = -(-chunk.reach // block_size)
        tables[c, :used] = chunk.sequence.blocks[:used]
        if chunk.room is not None:
            drafting.append((draws, len(entries), chunk.count, chunk.room))
        entries += [(c, *entry) for entry in _entries(chunk)]
        if prompt.tokens is None or prompt.positions is None:  # decoding
            tokens.append(np.asarray(chunk.tokens))
            own = np.repeat(np.arange(chunk.start, chunk.end, dtype=np.int32)[:, None] + prompt.mrope.delta, 3, axis=1)
            preceding = prompt.mrope.last_position if chunk.start == chunk.sequence.prompt_tokens else own[0] - 1
        else:
            tokens.append(prompt.tokens[chunk.start : chunk.end])
            own = prompt.positions[chunk.start : chunk.end]
            preceding = prompt.positions[max(0, chunk.start - 1)]
            scored.append(_scored(chunk, row, prompt.tokens))
            first, last = prompt.image_range(chunk.start, chunk.count)
            if prompt.image_rows is not None and first < last:
                visual_rows.append(prompt.image_rows[first:last] - chunk.start + row)
                visual_embeds.append(prompt.embeddings(first, last))
        positions.append(own)
        before += [np.asarray(preceding, dtype=np.int32)[None], own[:-1]]
        row += chunk.count
        logit_rows += range(row - chunk.sampled, row)
        draws += chunk.sampled * len(chunk.sequence.choices)
    columns = np.asarray(entries, dtype=np.int32)
    step = StepInput(
        token_ids=np.concatenate(tokens).astype(np.int32), positions=np.concatenate(positions), before=np.concatenate(before),
        query_lens=columns[:, 2] - columns[:, 1], context_lens=columns[:, 1].copy(), block_tables=tables[columns[:, 0]],
        state_sources=columns[:, 3].copy(), state_slots=columns[:, 4].copy(), logit_rows=np.asarray(logit_rows, dtype=np.int32),
        scored=np.concatenate([np.zeros((0, 3), dtype=np.int32), *scored]),
        visual_rows=np.concatenate([np.zeros(0, dtype=np.int32), *visual_rows]).astype(np.int32),
        follows=np.concatenate([[0], columns[1:, 0] == columns[:-1, 0]]).astype(np.int32),
        copies=np.asarray([copy for chunk in chunks for copy in _copies(chunk)], dtype=np.int32).reshape(-1, 2),
        drafting=np.asarray(drafting, dtype=np.int32).reshape(-1, 4))
    return step, torch.cat(visual_embeds) if visual_embeds else None


def _entries(chunk: Chunk) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, slot read, slot written) of a chunk's entries; the last one writes the sequence's own slot. Of a token with
    drafts the first one does, and each draft writes a spare one."""
    own = chunk.sequence.state_slot or 0
    start, source = chunk.start, own
    if chunk.drafts:
        for slot in (own, *chunk.sequence.spare_slots[: len(chunk.drafts)]):
            yield start, start + 1, source, slot
            start, source = start + 1, slot
        return
    for length, slot in chunk.snapshots:
        if length < chunk.end:
            yield start, length, source, slot
            start, source = length, slot
    yield start, chunk.end, source, own


def _scored(chunk: Chunk, row: int, tokens: NDArray[np.int64]) -> Array:
    """Of a chunk whose first token is row `row` of T; `tokens`: of its prompt."""
    found = np.empty((chunk.scored, 3), dtype=np.int32)
    found[:, 0] = row + np.arange(chunk.scored)
    found[:, 1] = tokens[chunk.start + 1 : chunk.start + 1 + chunk.scored]
    found[:, 2] = chunk.sequence.request.prompt_logprobs or 0
    return found


def _copies(chunk: Chunk) -> Iterator[tuple[int, int]]:
    """A snapshot at the very end of an entry that writes a slot of the sequence is a copy of that slot."""
    written = {end: slot for _, end, _, slot in _entries(chunk)} if chunk.snapshots else {}
    yield from ((written[length], slot) for length, slot in chunk.snapshots if written[length] != slot)
