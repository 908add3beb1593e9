"""A pool of KV blocks in the shape of a real model, with contents that tell where each block belongs. Knows no channel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from cache_transfer.layout import CacheLayout, Range
from cache_transfer.memory import CacheMemory
from cache_transfer.regions import Landing
from cache_transfer.spans import Spans
from slipstream.config import EngineConfig
from slipstream.engine.caches import allocate
from slipstream.layers.batch import AttentionCache
from slipstream.types import AttentionLayer

LAYERS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 36, 8, 128, 16
"""Of Qwen3-8B: 144 KiB a token in bfloat16, 64 KiB for one block of one layer."""
PIECE = KV_HEADS * 2 * BLOCK_SIZE * HEAD_SIZE * 2
BLOCKS = 455
"""1 GiB less 0.02 %."""
SMALL_BLOCKS = 64
"""144 MiB."""


def layout(layers: int) -> CacheLayout:
    """Of so many tensors: LAYERS, or 1 that has all layers of a block in one piece."""
    heads = KV_HEADS * LAYERS // layers
    return CacheLayout(model_name="bench", weights_revision="none", block_size=BLOCK_SIZE, kv_dtype="bfloat16",
                       conv_dtype="bfloat16", layers=tuple(
                           AttentionLayer(name=f"layers.{i}", kv_heads=heads, head_size=HEAD_SIZE) for i in range(layers)))



@dataclass(frozen=True)
class Job:
    """A prompt to move, and where it lies on either side."""

    blocks: int
    shuffled: bool
    """False: one run of blocks in order, on both sides."""
    pool: int = BLOCKS
    """Blocks among which it is scattered."""
    layers: int = LAYERS
    """Tensors that each block has a piece of; 1: all layers lie in one piece."""

    @property
    def bytes(self) -> int:
        """Of all layers."""
        return self.blocks * LAYERS * PIECE

    def table(self, side: str) -> tuple[int, ...]:
        """Block table of `source` or `destination`."""
        if not self.shuffled:
            return tuple(range(self.blocks))
        rng = np.random.default_rng((self.blocks, side == "source"))
        return tuple(rng.permutation(self.pool)[: self.blocks].tolist())


class Pool:
    """One side's memory, every page of it touched."""

    def __init__(self, blocks: int, layers: int = LAYERS) -> None:
        self.layout, self.piece = layout(layers), PIECE * LAYERS // layers
        config = EngineConfig(kv_cache_tokens=blocks * BLOCK_SIZE, block_size=BLOCK_SIZE)
        caches = allocate(self.layout.layers, config, 0, torch.bfloat16, torch.device("cpu"))
        self.tensors = {f"layers.{i}.kv": cache.kv for i, cache in enumerate(caches) if isinstance(cache, AttentionCache)}
        self.memory = CacheMemory(self.layout, self.tensors)
        self._words = [tensor.view(torch.int64).numpy().reshape(blocks, -1) for tensor in self.tensors.values()]

    @cached_property
    def _pattern(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.random.default_rng(7).integers(1, 2**62, self.piece // 8)

    def fill(self, table: tuple[int, ...]) -> None:
        """Write what logical block j of layer i must hold, wherever the table puts it."""
        for layer, words in enumerate(self._words):
            for number, block in enumerate(table):
                np.bitwise_xor(self._pattern, number * len(self._words) + layer, out=words[block])

    def wrong(self, table: tuple[int, ...]) -> int:
        """Blocks that do not hold what `fill` would write."""
        expected, count = np.empty_like(self._pattern), 0
        for layer, words in enumerate(self._words):
            for number, block in enumerate(table):
                np.bitwise_xor(self._pattern, number * len(self._words) + layer, out=expected)
                count += not np.array_equal(expected, words[block])
        return count

    def clear(self) -> None:
        """Zeros everywhere."""
        for words in self._words:
            words.fill(0)

    def pieces(self, table: tuple[int, ...]) -> list[tuple[int, int]]:
        """(address, bytes) of each layer's blocks, in logical order, one by one."""
        return [(region.base + block * self.piece, self.piece) for region in self.memory.regions for block in table]

    def spans(self, table: tuple[int, ...]) -> Spans:
        """The same as a channel gets it: neighbours are one span."""
        where = Landing(blocks=table, state_slot=None)
        return self.memory.spans(where, [Range(i, 0, len(table) * BLOCK_SIZE) for i in range(len(self._words))])
