"""Checkpoints as they are on disk, whole and broken: every parameter is loaded, or the error names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream.errors import CheckpointError
from slipstream.models import registry
from slipstream.models.qwen import CausalLM

HIDDEN, VOCAB, HEADS, KV, HEAD, WIDE = 16, 40, 2, 1, 8, 24

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB,
          "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD, "intermediate_size": WIDE,
          "num_hidden_layers": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
          "tie_word_embeddings": False, "torch_dtype": "float32"}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = {"model.embed_tokens.weight": some(VOCAB, HIDDEN), "model.norm.weight": some(HIDDEN),
             "lm_head.weight": some(VOCAB, HIDDEN)}
    for i in range(2):
        p = f"model.layers.{i}."
        a = p + "self_attn."
        found |= {a + "q_proj.weight": some(HEADS * HEAD, HIDDEN), a + "k_proj.weight": some(KV * HEAD, HIDDEN),
                  a + "v_proj.weight": some(KV * HEAD, HIDDEN), a + "o_proj.weight": some(HIDDEN, HEADS * HEAD),
                  a + "q_norm.weight": some(HEAD), a + "k_norm.weight": some(HEAD),
                  p + "mlp.gate_proj.weight": some(WIDE, HIDDEN), p + "mlp.up_proj.weight": some(WIDE, HIDDEN),
                  p + "mlp.down_proj.weight": some(HIDDEN, WIDE), p + "input_layernorm.weight": some(HIDDEN),
                  p + "post_attention_layernorm.weight": some(HIDDEN)}
    return found


def write(folder: Path, weights: dict[str, Tensor], **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(weights, folder / "model.safetensors")
    return folder


def load(folder: Path) -> CausalLM:
    return registry.load(checkpoints.read(folder), dtype=torch.float32, device=torch.device("cpu"))


def test_every_parameter_is_loaded(tmp_path: Path) -> None:
    weights = tensors()
    model = load(write(tmp_path, weights))
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_only_files_of_the_index_are_read(tmp_path: Path) -> None:
    """A stray model.safetensors beside the shards changes nothing (LD-11)."""
    weights = tensors()
    write(tmp_path, {name: tensor + 1 for name, tensor in weights.items()})
    names = sorted(weights)
    halves = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = dict(load(tmp_path).named_parameters())
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_extra_heads_are_left_out_and_a_tied_head_is_not_wanted(tmp_path: Path) -> None:
    weights = tensors()
    write(tmp_path, {**weights, "mtp.fc.weight": torch.ones(4, 4)}, tie_word_embeddings=True)
    model = load(tmp_path)
    assert model.lm_head is None


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(("change", "words"), [
    ({Q: None}, r"lacks 1 weights: model\.layers\.1\.self_attn\.q_proj\.weight \(16, 16\)"),
    ({Q: torch.zeros(16, 17)}, r"q_proj\.weight in .*expected shape \(16, 16\), found \(16, 17\)"),
    ({Q: torch.full((16, 16), float("nan"))}, r"q_proj\.weight in .* holds NaN or infinity"),
    ({Q: torch.full((16, 16), float("inf"))}, r"NaN or infinity"),
    ({Q: torch.zeros(16, 16, dtype=torch.int32)}, r"is stored as torch\.int32"),
    ({"model.layers.2.mlp.up_proj.weight": torch.zeros(24, 16)}, r"does not have: model\.layers\.2\.mlp\.up_proj\.weight"),
    ({"model.language_model.norm.weight": torch.zeros(16)}, r"are the same weight"),
])
def test_a_wrong_weight_stops_loading_and_is_named(tmp_path: Path, change: dict[str, Tensor | None], words: str) -> None:
    weights: dict[str, Tensor] = tensors()
    for name, tensor in change.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    with pytest.raises(CheckpointError, match=words):
        load(write(tmp_path, weights))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
        load(tmp_path)


def test_an_index_that_promises_too_much_is_named(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    held = load_file(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys([*held, "model.extra.weight"], "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight is in .* but it is not"):
        load(tmp_path)
    index["weight_map"]["model.norm.weight"] = "gone.safetensors"
    del index["weight_map"]["model.extra.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors does not exist"):
        load(tmp_path)


@pytest.mark.parametrize(("config", "words"), [
    ({"architectures": ["LlamaForCausalLM"]}, r"LlamaForCausalLM; known: Qwen2ForCausalLM, Qwen2VLFor"),
    ({"architectures": []}, r"`architectures` is missing"),
    ({"vocab_size": None}, r"`vocab_size` is missing"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope type 'yarn' is not supported"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}}, r"add up to 4"),
    ({"layer_types": ["full_attention", "linear_attention"]}, r"`linear_num_key_heads` is missing"),
    ({"hidden_size": "wide"}, r"holds a value of the wrong kind"),
    ({"layer_types": ["full_attention"]}, r"layer_types names 1 layers, num_hidden_layers says 2"),
    ({"layer_types": ["full_attention", "sliding"]}, r"layer 1 is of type 'sliding'"),
])
def test_a_config_that_cannot_be_served_is_refused_at_start(tmp_path: Path, config: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(write(tmp_path, tensors(), **config))


def test_mrope_is_keyed_on_the_section_not_on_the_type(tmp_path: Path) -> None:
    """rope_type `default` with a section, as Qwen3.5 has it (MR-28)."""
    rope = checkpoints.read(checkpoints.DEMO).rope
    assert rope.mrope_section == (6, 5, 5)
    assert rope.mrope_interleaved


def test_a_folder_without_config_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"give model\.path a checkpoint folder"):
        checkpoints.read(tmp_path)


def test_a_hub_id_is_found_in_the_local_cache_or_the_error_says_what_to_download(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"download it first: hf download Qwen/Tiny --revision main"):
        checkpoints.resolve("Qwen/Tiny", tmp_path)
    repository = tmp_path / "models--Qwen--Tiny"
    for revision in ("aaa", "bbb"):
        (repository / "snapshots" / revision).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("bbb\n")
    with pytest.raises(CheckpointError, match="only a part of Qwen/Tiny"):
        checkpoints.resolve("Qwen/Tiny", tmp_path)
    write(repository / "snapshots" / "bbb", tensors())
    write(repository / "snapshots" / "aaa", tensors())
    assert checkpoints.resolve("Qwen/Tiny", tmp_path) == repository / "snapshots" / "bbb"
    assert checkpoints.resolve("Qwen/Tiny@aaa", tmp_path).name == "aaa"
    with pytest.raises(CheckpointError, match="--revision v2"):
        checkpoints.resolve("Qwen/Tiny@v2", tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        checkpoints.resolve("/no/such/folder", tmp_path)
    assert checkpoints.resolve(str(tmp_path), tmp_path) == tmp_path
