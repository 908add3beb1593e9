"""Makes an engine out of a configuration: device, dtype, weights, caches. Knows no role."""

from __future__ import annotations

import logging
import time

import torch

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import Checkpoint
from slipstream.config import Config, EngineConfig, ModelConfig, hub_cache
from slipstream.engine import caches
from slipstream.engine.engine import Engine
from slipstream.engine.executor import RankExecutor
from slipstream.engine.gang import Log
from slipstream.errors import ConfigError
from slipstream.layers.batch import LayerCache
from slipstream.layers.parallel import Communicator
from slipstream.models import registry, weights
from slipstream.types import KvScales

logger = logging.getLogger(__name__)


def checkpoint_of(config: Config) -> Checkpoint:
    """What is served; with the layer that drafts, if that is wanted. Raises ConfigError and CheckpointError."""
    return checkpoints.read(checkpoints.resolve(config.model.path, hub_cache()), drafts=config.speculative.tokens > 0)


def device_of(model: ModelConfig) -> torch.device:
    """`model.device`; `auto` is a GPU if torch sees one. Raises ConfigError for one that is unknown or not there."""
    has_gpu = torch.cuda.is_available()
    if model.device == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    if model.device not in ("cpu", "cuda"):
        raise ConfigError(f"model.device must be auto, cpu or cuda, not {model.device!r}", field="model.device")
    if model.device == "cuda" and not has_gpu:
        raise ConfigError("model.device is cuda, but torch sees no GPU; install a ROCm or CUDA build of torch, or say cpu",
                          field="model.device")
    return torch.device(model.device)


def dtype_name(model: ModelConfig, checkpoint: Checkpoint, device: torch.device) -> str:
    """`model.dtype`; `auto` is float32 on the CPU and the checkpoint's own elsewhere. Raises ConfigError if unknown."""
    if model.dtype == "auto":
        return "float32" if device.type == "cpu" else checkpoint.dtype
    if model.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"model.dtype must be auto, float32 or bfloat16, not {model.dtype!r}", field="model.dtype")
    return model.dtype


def kv_cache(checkpoint: Checkpoint, config: EngineConfig, dtype: str) -> tuple[str, KvScales]:
    """What keys and values are kept in, by torch's name for it, and what each layer's are divided by; in the model's own
    `dtype` they are not. Raises CheckpointError for a scale that cannot be."""
    return (dtype, ()) if config.kv_dtype == "auto" else ("float8_e4m3fn", weights.kv_scales(checkpoint))


def build(checkpoint: Checkpoint, model: ModelConfig, config: EngineConfig, *, parked_fraction: float = 1.0,
          state_snapshots: int | None = None, draft_tokens: int = 0, comm: Communicator | None = None,
          log: Log | None = None) -> Engine:
    """Load the weights, logging the progress, and make the engine. Sets torch's threads to `config.threads`. `comm`, `log`: of
    rank 0 of a replica of several ranks.

    Raises ConfigError and CheckpointError.
    """
    began = time.monotonic()
    device, name, part = _load(checkpoint, model, config, comm)
    engine = Engine(part, checkpoint, config, parked_fraction=parked_fraction, state_snapshots=state_snapshots,
                    draft_tokens=draft_tokens, dtype=registry.dtype_of(name), device=device, comm=comm, log=log)
    load = engine.load()
    logger.info("engine ready: %s %s on %s, %d blocks of %d tokens, %d state slots, %.1f s", checkpoint.architecture, name,
                device, load.total_blocks, config.block_size, load.total_state_slots, time.monotonic() - began)
    return engine


def build_rank(checkpoint: Checkpoint, model: ModelConfig, config: EngineConfig, comm: Communicator, *,
               state_snapshots: int | None = None, draft_tokens: int = 0) -> tuple[RankExecutor, tuple[LayerCache, ...]]:
    """What another rank than rank 0 needs: the executor of its part, and its caches. Otherwise as `build`."""
    device, name, part = _load(checkpoint, model, config, comm)
    dtype = registry.dtype_of(name)
    slots = caches.num_state_slots(checkpoint, config, draft_tokens) + caches.num_snapshots(checkpoint, config, state_snapshots)
    own = caches.allocate(comm.shard.specs(checkpoint.layers), config, slots, dtype, device)
    logger.info("rank %d ready: layers %d to %d, tensor rank %d of %d", comm.shard.rank, comm.shard.layers[0],
                comm.shard.layers[-1], comm.shard.tp_rank, comm.shard.tp)
    return RankExecutor(part, own, config.block_size, device, comm, checkpoint=checkpoint, dtype=dtype,
                        draft_tokens=draft_tokens), own


def _load(checkpoint: Checkpoint, model: ModelConfig, config: EngineConfig, comm: Communicator | None
          ) -> tuple[torch.device, str, registry.LanguageModel]:
    torch.set_num_threads(config.threads)
    device = device_of(model)
    name = dtype_name(model, checkpoint, device)
    _, scales = kv_cache(checkpoint, config, name)
    if checkpoint.has_linear_layers and config.state_dtype != "float32":
        logger.warning("engine.state_dtype is %s: recurrent states lose digits with every token", config.state_dtype)
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(1, total)
        if tenth != shown:
            shown = tenth
            logger.info("loading weights: %d of %d tensors", done, total)

    part = registry.load(checkpoint, dtype=registry.dtype_of(name), device=device, comm=comm, progress=progress)
    if scales:
        part.scale_kv(scales)
    return device, name, part
