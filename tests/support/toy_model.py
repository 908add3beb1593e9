"""A language model without weights: each next token is a checksum of everything that the caches must hold for it.

It reads its context back through the block table and the state slot, so that a row written to the wrong place, a stale state,
a wrong position or a shifted image embedding changes the answer. `answer` says what must come out, without any cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import Checkpoint
from slipstream.kernels import dispatch
from slipstream.layers.batch import AttentionCache, ForwardBatch, LayerCache, LinearCache
from slipstream.types import AttentionLayer, LinearLayer

VOCAB = 64
IMAGE = 60
PATCH, MERGE = 2, 2
PRIME = 8191  # products of two smaller numbers are exact in float32


def toy_checkpoint(*, hybrid: bool = True, vision: bool = True, max_context: int = 400) -> Checkpoint:
    """One Gated-DeltaNet layer (if `hybrid`) and one attention layer."""
    demo = checkpoints.read(checkpoints.DEMO)
    assert demo.vision is not None
    linear = LinearLayer(name="layers.0", key_heads=1, value_heads=1, key_head_size=1, value_head_size=1, conv_width=2)
    attention = AttentionLayer(name="layers.1", kv_heads=1, head_size=4)
    return dataclasses.replace(
        demo, vocab_size=VOCAB, max_context=max_context, layers=(linear, attention) if hybrid else (attention,),
        vision=dataclasses.replace(demo.vision, patch_size=PATCH, merge_size=MERGE) if vision else None,
        image_token_id=IMAGE if vision else None, video_token_id=IMAGE + 1 if vision else None)


def image_values(pixels: NDArray[np.uint8]) -> list[int]:
    """What the toy's vision tower sees: one number per merged patch, from its first pixel."""
    side = PATCH * MERGE
    return [64 + int(pixels[y, x, 0]) for y in range(0, pixels.shape[0], side) for x in range(0, pixels.shape[1], side)]


def _mix(state: int, value: int, position: Sequence[int]) -> int:
    return (state * 31 + value * 7 + position[0] + 3 * position[1] + 5 * position[2] + 1) % PRIME


def answer(values: Sequence[int], positions: Sequence[Sequence[int]], delta: int, count: int, *,
           hybrid: bool = True) -> list[int]:
    """`count` greedy tokens after a prompt of token (or image) values at positions [t, h, w]."""
    values, places, outputs = list(values), [list(map(int, p)) for p in positions], []
    for _ in range(count):
        checksum = 0
        for value, place in zip(values, places, strict=True):
            checksum = _mix(checksum, value, place)
        outputs.append((checksum * 2 + (checksum if hybrid else 0)) % (IMAGE - 1))
        places.append([len(values) + delta] * 3)
        values.append(outputs[-1])
    return outputs


class ToyModel:
    """A LanguageModel and VisionModel; `fail_on` makes the forward pass of a batch with this token raise."""

    def __init__(self, checkpoint: Checkpoint, fail_on: int | None = None) -> None:
        self.kernels = dispatch.choose("reference")
        self.layers = checkpoint.layers
        self.fail_on = fail_on
        self.forwards = 0
        self.encoded = 0
        self.before_forward: Callable[[], None] = lambda: None

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache],
                on_layer: Callable[[int], None] | None = None, *, hidden: Tensor | None = None,
                on_scored: Callable[[Tensor], None] | None = None) -> Tensor:
        """[R, vocab] logits with one clear maximum."""
        self.before_forward()
        self.forwards += 1
        values = batch.token_ids.clone()
        if batch.visual_rows is not None:
            assert batch.visual_embeds is not None
            assert bool((values[batch.visual_rows] == IMAGE).all()), "only placeholder rows take an embedding"
            values[batch.visual_rows] = batch.visual_embeds[:, 0].long()
        assert not bool((values == IMAGE).any()), "every placeholder row takes an embedding"
        sums: dict[int, int] = {}
        for layer, cache in enumerate(caches):
            if isinstance(cache, LinearCache):
                self._linear(batch, cache, values, sums)
            else:
                self._attention(batch, cache, values, sums)
            if on_layer is not None:
                on_layer(layer)
            if self.fail_on is not None and bool((batch.token_ids == self.fail_on).any()):
                raise RuntimeError("the toy was told to fail")
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        for r, row in enumerate(batch.logit_rows.tolist()):
            logits[r, sums[row] % (IMAGE - 1)] = 1.0
        drawn, scored = torch.split(logits, [len(logits) - batch.scored, batch.scored])
        if on_scored is not None and batch.scored:
            on_scored(scored)
        return drawn

    def encode_images(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """[n, 2] per image; the first column is what `image_values` says."""
        self.encoded += len(pixels)
        return [torch.tensor([[float(v), 0.0] for v in image_values(image)]) for image in pixels]

    def _linear(self, batch: ForwardBatch, cache: LinearCache, values: Tensor, sums: dict[int, int]) -> None:
        row = 0
        for s, (query, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            slot = int(batch.state_slots[s])
            state = int(cache.recurrent[batch.sources[s], 0, 0, 0]) if context else 0
            for _ in range(query):
                state = _mix(state, int(values[row]), batch.positions[row].tolist())
                sums[row] = state
                row += 1
            cache.recurrent[slot, 0, 0, 0] = state

    def _attention(self, batch: ForwardBatch, cache: AttentionCache, values: Tensor, sums: dict[int, int]) -> None:
        size = cache.kv.shape[3]
        for row, place in enumerate(batch.slot_mapping.tolist()):
            cache.kv[place // size, 0, 0, place % size, 0] = float(values[row])
            cache.kv[place // size, 0, 1, place % size, :3] = batch.positions[row].float()
        row = 0
        for s, (query, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            checksum, table = 0, batch.block_tables[s].tolist()
            for at in range(context + query):
                key, value = cache.kv[table[at // size], 0, :, at % size]
                checksum = _mix(checksum, int(key[0]), [int(axis) for axis in value[:3]])
            last = row + query - 1
            sums[last] = sums.get(last, 0) + 2 * checksum
            row += query
