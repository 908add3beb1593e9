"""Makes an engine out of a configuration: device, dtype, weights, caches. Knows no role."""

from __future__ import annotations

import logging
import time

import torch

from slipstream.checkpoint import Checkpoint
from slipstream.config import EngineConfig, ModelConfig
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.models import registry

logger = logging.getLogger(__name__)


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


def build(checkpoint: Checkpoint, model: ModelConfig, config: EngineConfig, *, parked_fraction: float = 1.0,
          state_snapshots: int | None = None) -> Engine:
    """Load the weights, logging the progress, and make the engine. Sets torch's threads to `config.threads`.

    Raises ConfigError and CheckpointError.
    """
    torch.set_num_threads(config.threads)
    device = device_of(model)
    name = dtype_name(model, checkpoint, device)
    dtype = registry.dtype_of(name)
    began = time.monotonic()
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(1, total)
        if tenth != shown:
            shown = tenth
            logger.info("loading weights: %d of %d tensors", done, total)

    language_model = registry.load(checkpoint, dtype=dtype, device=device, progress=progress)
    engine = Engine(language_model, checkpoint, config, parked_fraction=parked_fraction, state_snapshots=state_snapshots,
                    dtype=dtype, device=device)
    load = engine.load()
    logger.info("engine ready: %s %s on %s, %d blocks of %d tokens, %d state slots, %.1f s", checkpoint.architecture, name,
                device, load.total_blocks, config.block_size, load.total_state_slots, time.monotonic() - began)
    return engine
