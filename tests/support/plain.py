"""Runs a model by hand over paged caches, one sequence, with blocks and slot out of order and every unused cell poisoned.

Or one rank's part of a model: every rank is then told the same, and those without logits return [T, 0].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.checkpoint import Checkpoint
from slipstream.layers.batch import AttentionCache, DraftCache, ForwardBatch, LayerCache, LinearCache
from slipstream.models.qwen import CausalLM
from slipstream.models.registry import VisionModel
from slipstream.positions import mrope_positions, placeholders
from slipstream.sharding import visual_levels
from slipstream.types import AttentionLayer, DraftLayer, Grid

BLOCK_SIZE = 16
POISON = float("nan")


@dataclass(kw_only=True)
class Plain:
    """One sequence."""

    model: CausalLM
    checkpoint: Checkpoint
    blocks: int = 32
    slot: int = 1
    length: int = 0
    last: NDArray[np.int32] = field(default_factory=lambda: np.zeros((1, 3), np.int32))
    delta: int = 0
    caches: list[LayerCache] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    layers_done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        dtype = self.dtype
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(7))
        self.table = [int(block) for block in order]
        for layer in self.model.comm.shard.specs(self.checkpoint.layers):
            if isinstance(layer, AttentionLayer):
                shape = (self.blocks, layer.kv_heads, 2, BLOCK_SIZE, layer.head_size)
                kv = torch.full(shape, POISON, dtype=dtype)
                self.caches.append(DraftCache(kv=kv, hidden=torch.full((3, layer.hidden_size), POISON, dtype=dtype))
                                   if isinstance(layer, DraftLayer) else AttentionCache(kv=kv))
                continue
            self.caches.append(LinearCache(
                conv=torch.full((3, sum(layer.conv_segments), layer.conv_width - 1), POISON, dtype=dtype),
                recurrent=torch.full((3, layer.value_heads, layer.key_head_size, layer.value_head_size), POISON)))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], pixels: Sequence[NDArray[np.uint8]] = (), *, chunk: int = 1 << 30,
                positions: NDArray[np.int32] | None = None, t_step: float = 1.0) -> Tensor:
        """Logits of every prompt token, [T, vocab]. `pixels`: [H, W, 3], or a video's [F, H, W, 3]. `positions`: instead of the
        right ones."""
        checkpoint = self.checkpoint
        merge = checkpoint.vision.merge_size if checkpoint.vision else 1
        patch = checkpoint.vision.patch_size if checkpoint.vision else 1
        grids = [Grid(t=max(1, image.shape[0] // 2) if image.ndim == 4 else 1, h=image.shape[-3] // patch,
                      w=image.shape[-2] // patch, t_step=t_step) for image in pixels]
        right, self.delta = mrope_positions(tokens, grids, image_token_id=checkpoint.image_token_id,
                                            video_token_id=checkpoint.video_token_id, merge_size=merge)
        positions = right if positions is None else positions
        places = [int(row) for row in placeholders(tokens, checkpoint.image_token_id, checkpoint.video_token_id)]
        embeds, comm = None, self.model.comm
        if pixels and comm.shard.rank == 0:
            assert isinstance(self.model, VisionModel)
            embeds = torch.cat(self.model.encode_images(pixels))
        if pixels and comm.shard.first:
            width = (1 + visual_levels(checkpoint, comm.shard)) * checkpoint.hidden_size
            embeds = comm.broadcast(embeds, (len(places), width), self.dtype)
        out = []
        for start in range(0, len(tokens), chunk):
            part = slice(start, start + chunk)
            inside = [k for k, place in enumerate(places) if start <= place < start + chunk]
            out.append(self._forward(tokens[part], positions[part], [places[k] - start for k in inside],
                                     embeds[inside] if embeds is not None else None))
        return torch.cat(out)

    @torch.inference_mode()
    def decode(self, token: int, delta: int | None = None) -> Tensor:
        """Logits after one more token, [vocab]. `delta`: instead of the right one."""
        position = self.length + (self.delta if delta is None else delta)
        return self._forward([token], np.full((1, 3), position, np.int32), [], None)[0]

    def greedy(self, first: int, count: int, delta: int | None = None) -> list[int]:
        """`count` output ids, the first of which is given."""
        out = [first]
        while len(out) < count:
            out.append(int(self.decode(out[-1], delta).argmax()))
        return out

    def _forward(self, tokens: Sequence[int], positions: NDArray[np.int32], rows: list[int], embeds: Tensor | None) -> Tensor:
        count = len(tokens)
        places = [self.length + i for i in range(count)]
        before, self.last = np.concatenate((self.last, positions[:-1])), positions[-1:]
        slots = [self.table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens), positions=torch.tensor(positions), before=torch.tensor(before),
            query_lens=(count,), context_lens=(self.length,),
            block_tables=torch.tensor([self.table], dtype=torch.int32), slot_mapping=torch.tensor(slots),
            state_slots=torch.tensor([self.slot]), logit_rows=torch.arange(count),
            visual_rows=torch.tensor(rows) if rows else None, visual_embeds=embeds if rows else None)
        comm = self.model.comm
        given = count + visual_levels(self.checkpoint, comm.shard) * len(rows)
        hidden = None if comm.shard.first else comm.recv((given, self.checkpoint.hidden_size), self.dtype)
        logits: Tensor | None = self.model(batch, self.caches, self.layers_done.append, hidden=hidden)
        self.length += count
        return torch.empty(count, 0) if logits is None else logits
