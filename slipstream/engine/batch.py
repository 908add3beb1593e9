"""Turns the chunks of a step into the ragged batch that the model takes; knows no schedule and no pool.

T tokens of the step, S sequences, B longest block table, P tokens per block, R rows that sample, M image rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    widest = max(-(-(chunk.start + chunk.count) // block_size) for chunk in chunks)
    tables_SB = np.zeros((len(chunks), widest), dtype=np.int32)
    row = 0
    for s, chunk in enumerate(chunks):
        prompt, end = prompts[chunk.sequence.id], chunk.start + chunk.count
        used = -(-end // block_size)
        tables_SB[s, :used] = chunk.sequence.blocks[:used]
        at = np.arange(chunk.start, end)
        slots.append(tables_SB[s, at // block_size].astype(np.int64) * block_size + at % block_size)
        if prompt.tokens is None or prompt.positions is None:  # decoding
            tokens.append(np.asarray(chunk.tokens, dtype=np.int64))
            positions.append(np.full((1, 3), chunk.start + prompt.mrope.delta, dtype=np.int32))
        else:
            tokens.append(prompt.tokens[chunk.start : end])
            positions.append(prompt.positions[chunk.start : end])
            first, last = prompt.image_range(chunk.start, chunk.count)
            if prompt.image_rows is not None and first < last:
                assert prompt.embeds is not None, "images are encoded before the batch is built"
                visual_rows.append(prompt.image_rows[first:last] - chunk.start + row)
                visual_embeds.append(prompt.embeds[first:last])
        row += chunk.count
        if chunk.samples:
            logit_rows.append(row - 1)
    return ForwardBatch(
        token_ids=torch.from_numpy(np.concatenate(tokens)).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        query_lens=tuple(chunk.count for chunk in chunks),
        context_lens=tuple(chunk.start for chunk in chunks),
        block_tables=torch.from_numpy(tables_SB).to(device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        state_slots=torch.tensor([chunk.sequence.state_slot or 0 for chunk in chunks], dtype=torch.int64, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        visual_rows=torch.from_numpy(np.concatenate(visual_rows)).to(device) if visual_rows else None,
        visual_embeds=torch.cat(visual_embeds) if visual_embeds else None,
    )
