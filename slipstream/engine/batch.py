"""Turns the chunks of a step into the ragged batch that the model takes; knows no schedule and no pool.

T tokens of the step, S entries, B longest block table, P tokens per block, R rows that sample, M image rows. A chunk that
leaves a snapshot on its way is two entries or more: each goes on from the state that the one before it left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.prompt import Prompt
from slipstream.engine.scheduler import Chunk
from slipstream.layers.batch import ForwardBatch
from slipstream.types import RequestId


def build(chunks: Sequence[Chunk], prompts: Mapping[RequestId, Prompt], block_size: int, device: torch.device) -> ForwardBatch:
    """The batch of at least one chunk; image rows take slices of their prompt's embeddings, which exist by now."""
    tokens: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int32]] = []
    slots: list[NDArray[np.int64]] = []
    visual_rows: list[NDArray[np.int64]] = []
    visual_embeds: list[torch.Tensor] = []
    logit_rows: list[int] = []
    entries: list[tuple[int, int, int, int, int]] = []  # chunk, start, end, slot read, slot written
    widest = max(-(-chunk.end // block_size) for chunk in chunks)
    tables = np.zeros((len(chunks), widest), dtype=np.int32)
    row = 0
    for c, chunk in enumerate(chunks):
        prompt = prompts[chunk.sequence.id]
        used = -(-chunk.end // block_size)
        tables[c, :used] = chunk.sequence.blocks[:used]
        at = np.arange(chunk.start, chunk.end)
        slots.append(tables[c, at // block_size].astype(np.int64) * block_size + at % block_size)
        entries += [(c, *entry) for entry in _entries(chunk)]
        if prompt.tokens is None or prompt.positions is None:  # decoding
            tokens.append(np.asarray(chunk.tokens, dtype=np.int64))
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
    return ForwardBatch(
        token_ids=torch.from_numpy(np.concatenate(tokens)).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        query_lens=tuple(end - start for _, start, end, *_ in entries),
        context_lens=tuple(start for _, start, *_ in entries),
        block_tables=torch.from_numpy(tables[[c for c, *_ in entries]]).to(device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        state_slots=torch.tensor([target for *_, target in entries], dtype=torch.int64, device=device),
        state_sources=torch.tensor([source for *_, source, _ in entries], dtype=torch.int64, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        visual_rows=torch.from_numpy(np.concatenate(visual_rows)).to(device) if visual_rows else None,
        visual_embeds=torch.cat(visual_embeds) if visual_embeds else None,
        follows=tuple(entry > 0 and entries[entry - 1][0] == chunk for entry, (chunk, *_) in enumerate(entries)),
    )


def _entries(chunk: Chunk) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, slot read, slot written) of a chunk's entries; the last one writes the sequence's own slot."""
    own = chunk.sequence.state_slot or 0
    start, source = chunk.start, own
    for length, slot in chunk.snapshots:
        if length < chunk.end:
            yield start, length, source, slot
            start, source = length, slot
    yield start, chunk.end, source, own
