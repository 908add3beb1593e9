"""What transformers writes, we read to the same logits: one file, many shards, with and without `model.language_model.`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import checkpoint as checkpoints
from slipstream.errors import CheckpointError
from slipstream.models import registry
from slipstream.models.qwen import CausalLM
from tests.support import oracle, tiny
from tests.support.plain import Plain

TOKENS = torch.randint(0, 490, (40,), generator=torch.Generator().manual_seed(1)).tolist()
INDEX = "model.safetensors.index.json"


def load(folder: Path) -> CausalLM:
    return registry.load(checkpoints.read(folder), dtype=torch.float32, device=torch.device("cpu"))


def logits(folder: Path) -> torch.Tensor:
    return Plain(model=load(folder), checkpoint=checkpoints.read(folder)).prefill(TOKENS, chunk=7)


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


def test_experts_as_qwen3_vl_moe_is_published(tmp_path: Path) -> None:
    """Inputs before outputs; transformers writes them the other way round, and reads both."""
    folder = tiny.write("qwen3_moe_vl", tmp_path / "published")
    expected = oracle.logits(folder, TOKENS)
    straight = dict(load(folder).named_parameters())
    tensors = {key: tensor.transpose(1, 2).contiguous() if ".experts." in key else tensor
               for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    found = dict(load(folder).named_parameters())
    assert all(torch.equal(found[key], straight[key]) for key in straight)
    assert (logits(folder) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_vl"])
def test_experts_in_one_tensor_are_the_same_model(name: str, tmp_path: Path) -> None:
    """transformers writes a matrix for each expert; Qwen3.5-MoE is published with [experts, ...] tensors and an MTP layer."""
    folder = tiny.write(name, tmp_path / name)
    expected = oracle.logits(folder, TOKENS)
    assert (logits(folder) - expected).abs().max() < 1e-4
    apart = dict(load(folder).named_parameters())
    tensors = load_file(folder / "model.safetensors")
    experts = sorted(key for key in tensors if ".experts." in key)
    assert len(experts) == 4 * 8 * 3
    for stem in {key.partition(".experts.")[0] + ".experts." for key in experts}:
        gate, up, down = (torch.stack([tensors.pop(f"{stem}{expert}.{part}_proj.weight") for expert in range(8)])
                          for part in ("gate", "up", "down"))
        tensors |= {stem + "gate_up_proj": torch.cat((gate, up), 1), stem + "down_proj": down,
                    "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors")
    joined = dict(load(folder).named_parameters())
    assert joined.keys() == apart.keys()
    assert all(torch.equal(joined[key], apart[key]) for key in apart)
    assert (logits(folder) - expected).abs().max() < 1e-4
