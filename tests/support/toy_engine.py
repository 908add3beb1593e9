"""An engine on the toy model, and prompts whose right answers are known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.types import Grid
from tests.support.toy_model import IMAGE, MERGE, PATCH, ToyModel, answer, image_values, toy_checkpoint


def make(*, hybrid: bool = True, vision: bool = True, fail_on: int | None = None, parked_fraction: float = 1.0,
         max_context: int = 400, clock: Callable[[], float] = time.monotonic, **config: Any) -> tuple[Engine, ToyModel]:
    checkpoint = toy_checkpoint(hybrid=hybrid, vision=vision, max_context=max_context)
    values: dict[str, Any] = {"block_size": 4, "kv_cache_tokens": 1024, "max_running": 8, "max_batch_tokens": 64} | config
    model = ToyModel(checkpoint, fail_on)
    return Engine(model, checkpoint, EngineConfig(**values), parked_fraction=parked_fraction, clock=clock), model


def text(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(IMAGE) for i in range(length)]


def expected(tokens: Sequence[int], count: int, *, hybrid: bool = True) -> list[int]:
    return answer(tokens, [[i] * 3 for i in range(len(tokens))], 0, count, hybrid=hybrid)


def picture(seed: int, h: int, w: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (h * PATCH, w * PATCH, 3), dtype=np.uint8)


def image_prompt(seed: int, grids: Sequence[Grid], between: Sequence[int]) -> tuple[list[int], list[np.ndarray], list[int]]:
    """Tokens, pixels and the values that the model sees; `between`: text tokens before, between and after the images."""
    tokens, values = text(seed, between[0]), text(seed, between[0])
    pixels = [picture(seed + i, grid.h, grid.w) for i, grid in enumerate(grids)]
    for i, (grid, length) in enumerate(zip(grids, between[1:], strict=True)):
        tokens += [IMAGE] * (grid.h * grid.w // MERGE**2) + text(seed + i, length)
        values += image_values(pixels[i]) + text(seed + i, length)
    return tokens, pixels, values
