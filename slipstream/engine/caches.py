"""Allocates the per-layer caches of a replica; knows no sequence and no owner."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from slipstream.checkpoint import Checkpoint
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels import fp8
from slipstream.layers.batch import AttentionCache, DraftCache, LayerCache, LinearCache
from slipstream.types import AttentionLayer, DraftLayer, LayerSpec


def num_blocks(config: EngineConfig) -> int:
    """Blocks of the pool. Raises ConfigError if not even one fits."""
    blocks = config.kv_cache_tokens // config.block_size
    if blocks < 1:
        raise ConfigError(f"engine.kv_cache_tokens ({config.kv_cache_tokens}) must hold at least one block of "
                          f"engine.block_size ({config.block_size}) tokens", field="engine.kv_cache_tokens")
    return blocks


def num_state_slots(checkpoint: Checkpoint, config: EngineConfig, draft_tokens: int = 0) -> int:
    """Slots for sequences: for each that runs one, and one for each of its drafts; 0 for a model without recurrent state."""
    return config.max_running * (1 + draft_tokens) if checkpoint.has_linear_layers else 0


def num_snapshots(checkpoint: Checkpoint, config: EngineConfig, wanted: int | None) -> int:
    """Slots for the prefix cache's snapshots; `wanted` None: as many as `config` says."""
    wanted = config.state_snapshots if wanted is None else wanted
    return wanted if checkpoint.has_linear_layers and config.prefix_cache else 0


def allocate(layers: Sequence[LayerSpec], config: EngineConfig, slots: int, dtype: torch.dtype, device: torch.device
             ) -> tuple[LayerCache, ...]:
    """One cache for each of this rank's `layers`, in their order: `kv` [N, H, 2, P, D], `hidden` [Z, hidden] and `conv`
    [Z, C, W - 1] in `dtype`, `recurrent` [Z, V, K, E] in float32, with Z = `slots`, snapshots included; `kv` in FP8 and
    `recurrent` in bfloat16 if `config` says so. Raises ConfigError if there is no memory for them."""
    blocks, kv_dtype = num_blocks(config), fp8.E4M3 if config.kv_dtype == "fp8_e4m3" else dtype
    state_dtype = torch.bfloat16 if config.state_dtype == "bfloat16" else torch.float32
    caches: list[LayerCache] = []
    try:
        for layer in layers:
            if isinstance(layer, AttentionLayer):
                shape = (blocks, layer.kv_heads, 2, config.block_size, layer.head_size)
                kv = _zeros(shape, kv_dtype, device)
                caches.append(DraftCache(kv=kv, hidden=_zeros((slots, layer.hidden_size), dtype, device))
                              if isinstance(layer, DraftLayer) else AttentionCache(kv=kv))
            else:
                conv = (slots, sum(layer.conv_segments), layer.conv_width - 1)
                recurrent = (slots, layer.value_heads, layer.key_head_size, layer.value_head_size)
                caches.append(LinearCache(conv=_zeros(conv, dtype, device), recurrent=_zeros(recurrent, state_dtype, device)))
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"no memory for {config.kv_cache_tokens} tokens of KV and {slots} state slots ({error}); lower "
                          "engine.kv_cache_tokens, engine.max_running or engine.state_snapshots",
                          field="engine.kv_cache_tokens") from error
    return tuple(caches)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU in huge pages, where the kernel has some: a process that reads it from outside pins page by page."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = tensor.data_ptr() + tensor.nbytes - start
        if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)  # advice: may fail
    return tensor.zero_()


def states_of(cache: LayerCache) -> dict[str, torch.Tensor]:
    """What a layer keeps in slots, by its name in the layout."""
    if isinstance(cache, LinearCache):
        return {"conv": cache.conv, "recurrent": cache.recurrent}
    return {"hidden": cache.hidden} if isinstance(cache, DraftCache) else {}


class CacheCopier:
    """Copies units of these caches; implements `memory.Copier`."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self._caches = caches

    def copy_block(self, source: int, target: int) -> None:
        """Keys and values of one block."""
        for cache in self._caches:
            if isinstance(cache, AttentionCache):
                cache.kv[target].copy_(cache.kv[source])

    def copy_state(self, source: int, target: int) -> None:
        """All states of one slot."""
        for cache in self._caches:
            for state in states_of(cache).values():
                state[target].copy_(state[source])
