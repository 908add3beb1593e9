"""What transformers writes, we read to the same logits: one file, many shards, with and without `model.language_model.`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slipstream import checkpoint as checkpoints
from slipstream.errors import CheckpointError
from slipstream.models import registry
from tests.support import oracle, tiny
from tests.support.plain import Plain

TOKENS = torch.randint(0, 490, (40,), generator=torch.Generator().manual_seed(1)).tolist()
INDEX = "model.safetensors.index.json"


def logits(folder: Path) -> torch.Tensor:
    checkpoint = checkpoints.read(folder)
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    return Plain(model=model, checkpoint=checkpoint).prefill(TOKENS, chunk=7)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny.write("qwen3_5_text", tmp_path / "sharded", max_shard_size="200KB")


def test_a_sharded_checkpoint_gives_the_same_logits(sharded: Path, tmp_path: Path) -> None:
    files = set(json.loads((sharded / INDEX).read_text())["weight_map"].values())
    assert len(files) > 2
    whole = logits(tiny.write("qwen3_5_text", tmp_path / "whole"))
    assert torch.equal(logits(sharded), whole)
    assert (whole - oracle.logits(sharded, TOKENS)).abs().max() < 1e-4


def test_a_shard_that_is_gone_or_cut_short_is_named(sharded: Path) -> None:
    """LD-09."""
    files = sorted(set(json.loads((sharded / INDEX).read_text())["weight_map"].values()))
    cut = sharded / files[0]
    held = cut.read_bytes()
    cut.write_bytes(held[: len(held) // 2])
    with pytest.raises(CheckpointError, match=rf"{files[0]} is not a complete safetensors file"):
        logits(sharded)
    cut.write_bytes(held)
    (sharded / files[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{files[1]} does not exist, but {INDEX} names it"):
        logits(sharded)
