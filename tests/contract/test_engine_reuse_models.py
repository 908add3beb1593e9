"""Prefix reuse on real models in float32: texts and pictures get the tokens that they get without a cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import checkpoint as checkpoints
from slipstream.block_hash import content_hash
from slipstream.checkpoint import DEMO, Checkpoint
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.models import registry
from slipstream.models.registry import LanguageModel
from slipstream.types import Grid
from tests.support import tiny
from tests.support.engine_driver import assert_empty, poison, request
from tests.support.engine_pair import Pair
from tests.support.samples import Sample, Samples

VIDEO = checkpoints.read(DEMO).video_token_id
Talk = tuple[list[int], list[Any], list[Any]]
"""Tokens, grids and pixels."""


def load(path: Path) -> tuple[LanguageModel, Checkpoint]:
    torch.set_num_threads(1)
    checkpoint = checkpoints.read(path)
    return registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu")), checkpoint


def engine(model: LanguageModel, checkpoint: Checkpoint, **config: Any) -> Engine:
    values: dict[str, Any] = {"kv_cache_tokens": 16 * 36, "max_running": 6, "max_batch_tokens": 96, "growth_tokens": 8,
                              "state_snapshots": 8} | config
    made = Engine(model, checkpoint, EngineConfig(**values))
    poison(made)
    return made


def asked(name: str, talk: Talk, count: int) -> GenerationRequest:
    hashes = [content_hash(pixels.shape[-3], pixels.shape[-2], pixels.tobytes()) for pixels in talk[2]]
    return request(name, talk[0], count, grids=talk[1], images=hashes, ignore_eos=True)


def grow(talk: Talk, rng: random.Random, samples: list[Sample], vocabulary: int) -> Talk:
    """One turn more: a sample with its pictures, two groups of a video's frames, or some text."""
    tokens, grids, pixels = (list(part) for part in talk)
    if samples and (not tokens or rng.random() < 0.5):
        sample = rng.choice(samples)
        return tokens + list(sample.tokens), grids + list(sample.grids), pixels + list(sample.pixels)
    if samples and rng.random() < 0.3:
        for _ in range(2):
            tokens += [rng.randrange(vocabulary), *[VIDEO] * 6]
            grids.append(Grid(t=1, h=4, w=6))
            pixels.append(np.random.default_rng(rng.randrange(4)).integers(0, 256, (2, 64, 96, 3), np.uint8))
    return tokens + [rng.randrange(vocabulary) for _ in range(rng.randrange(3, 40))], grids, pixels


@pytest.mark.parametrize("split", [True, False], ids=["split", "unsplit"])
@pytest.mark.parametrize("name", ["demo", "qwen3"])
def test_conversations_get_the_same_tokens_with_and_without_a_cache(name: str, split: bool, tmp_path: Path) -> None:
    """Hybrid with pictures, and dense; several at once; so little memory that blocks are evicted."""
    model, checkpoint = load(DEMO if name == "demo" else tiny.write(name, tmp_path))
    samples = [sample for sample in Samples(checkpoint).all() if len(sample.tokens) < 120] if name == "demo" else []
    plain = Pair(engine(model, checkpoint, prefix_cache=False, kv_cache_tokens=16 * 400), None)
    cached = Pair(engine(model, checkpoint), engine(model, checkpoint, kv_cache_tokens=16 * 48) if split else None)
    rng = random.Random(3)
    talks: list[Talk] = [([], [], [])]
    for number in range(30):
        talk = grow(rng.choice(talks[-6:]), rng, samples, 400)
        if len(talk[0]) > 420:
            continue
        count = rng.randrange(1, 14)
        plain.submit(asked(f"r{number}", talk, count), talk[2])
        cached.submit(asked(f"r{number}", talk, count), talk[2])
        plain.run()
        cached.run(rng.choice([0, 2, 10_000]))
        talks.append((talk[0] + plain.tokens[f"r{number}", 0], talk[1], talk[2]))
    cached.run()
    assert cached.tokens == plain.tokens
    for one in (*plain.engines(), *cached.engines()):
        assert_empty(one)
    counters = [one.counters() for one in cached.engines()]
    assert counters[0].cached_tokens > counters[0].prompt_tokens // 4, "reuse is real"
    assert counters[0].evicted_blocks > 0, "and so is the pressure"
    assert plain.prefill.counters().cached_tokens == 0
