"""Tiny random checkpoints, written by transformers: one per architecture, with norm weights that are not all alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slipstream.checkpoint import DEMO

VOCAB = 512
IMAGE, VIDEO, VISION_START, VISION_END = 500, 501, 502, 503

_LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
           "linear_num_value_heads": 4}
_TEXT_3_5: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                        "mrope_interleaved": True}, **_LINEAR}
_VISION = {"depth": 3, "hidden_size": 48, "intermediate_size": 96, "num_heads": 4, "patch_size": 16, "spatial_merge_size": 2,
           "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
_TEXT_3: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "rope_theta": 1e6}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_SPARSE_3_5 = {name: value for name, value in {**_TEXT_3_5, **_SHARED}.items() if name != "intermediate_size"}
_NEXT = {**_TEXT_3_5, **_SHARED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
_TEXT_2 = {name: value for name, value in _TEXT_3.items() if name != "head_dim"}
_MARKS: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
                          "vision_end_token_id": VISION_END}


def _vl_3(layers: int = 4, tied: bool = False, family: str = "Qwen3VL", **more: Any) -> Any:
    """Three deepstack features; with three layers one of them follows the last layer."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {**_TEXT_3, "num_hidden_layers": layers, "rope_theta": None, "rope_parameters": rope, **more}
    return getattr(transformers, f"{family}ForConditionalGeneration")(getattr(transformers, f"{family}Config")(
        text_config=text, vision_config={**_VISION, "depth": 4, "deepstack_visual_indexes": [0, 1, 3]},
        tie_word_embeddings=tied, **_MARKS))


def _vl_2_5() -> Any:
    """Windows of two by two tokens, in all blocks but one."""
    text = {**_TEXT_2, "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
    vision = {name: value for name, value in _VISION.items() if name != "num_position_embeddings"}
    return transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config={**vision, "window_size": 64, "fullatt_block_indexes": [1]}, **_MARKS))


def _vl_2() -> Any:
    """A tower that names its sizes otherwise."""
    text = {**_TEXT_2, "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 3, "embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 4, "patch_size": 16,
              "spatial_merge_size": 2, "temporal_patch_size": 2}
    return transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, **_MARKS))


def _text_3_5(tied: bool) -> Any:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**_TEXT_3_5, tie_word_embeddings=tied))


def _moe_3(**options: Any) -> Any:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_TEXT_3, **_EXPERTS, **options))


_MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_TEXT_3)),
    "qwen2_vl": _vl_2,
    "qwen2_5_vl": _vl_2_5,
    "qwen3_vl": _vl_3,
    "qwen3_tied_vl": lambda: _vl_3(layers=3, tied=True),
    "qwen3_moe_vl": lambda: _vl_3(family="Qwen3VLMoe", mlp_only_layers=[1], **_EXPERTS),
    "qwen3_5_text": lambda: _text_3_5(tied=False),
    "qwen3_5_text_tied": lambda: _text_3_5(tied=True),
    "qwen3_5_vl": lambda: transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(
        text_config=_TEXT_3_5, vision_config=_VISION, **_MARKS)),
    "qwen3_moe": lambda: _moe_3(norm_topk_prob=True),
    "qwen3_moe_mixed": lambda: _moe_3(norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3_5_moe_text": lambda: transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**_SPARSE_3_5)),
    "qwen3_5_moe_vl": lambda: transformers.Qwen3_5MoeForConditionalGeneration(transformers.Qwen3_5MoeConfig(
        text_config=_SPARSE_3_5, vision_config=_VISION, **_MARKS)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_TEXT_2)),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**_NEXT)),
}
NAMES = tuple(_MODELS)
FAMILIES = tuple(name for name in NAMES if name not in ("qwen3_tied_vl", "qwen3_5_text_tied", "qwen3_moe_mixed",
                                                        "qwen3_5_moe_text"))
"""Without further variants of one family."""
_QUICK = ("qwen2_5_vl", "qwen3_next", "qwen3_5_moe_vl")


def deployed(*more: str) -> list[Any]:
    """FAMILIES, and `more`, for tests with processes of their own: those that have the most parts, and the others as `long`."""
    return [pytest.param(name, marks=() if name in _QUICK else pytest.mark.long) for name in (*FAMILIES, *more)]


def declared(name: str) -> Any:
    """The configuration of `name`, as transformers writes it."""
    model = _MODELS[name]()
    model.config.architectures = [type(model).__name__]
    return model.config


SERVED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def as_served(folder: Path) -> Path:
    """Give a text-only checkpoint of vocabulary 1920 the weight names of a published one, and the demo's tokenizer."""
    weights = load_file(folder / "model.safetensors")
    save_file({name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})
    for name in SERVED:
        shutil.copy(DEMO / name, folder / name)
    return folder


def write_wide(folder: Path) -> Path:
    """A text-only Qwen3.5 that TP8 cuts, with the weight names and the tokenizer of a served checkpoint."""
    sizes = {**_TEXT_3_5, "vocab_size": 1920, "num_attention_heads": 8, "linear_num_value_heads": 8}
    config = transformers.Qwen3_5TextConfig(**sizes, tie_word_embeddings=True)
    torch.manual_seed(5)
    model: Any = transformers.Qwen3_5ForCausalLM(config)
    model.save_pretrained(folder)
    return as_served(folder)


def write_sparse(folder: Path, *, tied: bool) -> Path:
    """A text-only Qwen3.5 with experts, whose two stages of four layers have attention in both; wide enough that blocks of
    128 x 128 are several to a matrix, and that TP2 cuts inside them."""
    sizes = {**_SPARSE_3_5, "vocab_size": 1920, "hidden_size": 192, "head_dim": 64, "num_hidden_layers": 8,
             "moe_intermediate_size": 160, "shared_expert_intermediate_size": 96, "linear_num_value_heads": 8,
             "linear_key_head_dim": 32, "linear_value_head_dim": 32,
             "rope_parameters": {**_SPARSE_3_5["rope_parameters"], "mrope_section": [3, 3, 2]}}
    torch.manual_seed(3)
    model: Any = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**sizes, tie_word_embeddings=tied))
    _vary(model)
    model.save_pretrained(folder)
    return as_served(folder)


def _vary(model: Any) -> None:
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1:  # a norm whose weights are all alike would hide a confusion of w and 1 + w
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.dim() == 2 or ".experts." in path:  # initial weights this small would leave every logit nearly equal
                parameter.mul_(8.0 if "visual" in path else 3.0)


def write(name: str, folder: Path, seed: int = 0, max_shard_size: str = "5GB") -> Path:
    """Write the checkpoint of `name` into `folder`; a small `max_shard_size` makes a sharded index."""
    torch.manual_seed(seed)
    model = _MODELS[name]().eval().to(torch.float32)
    _vary(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if name.endswith("vl"):
        (folder / "preprocessor_config.json").write_text(json.dumps(
            {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}, "patch_size": 16, "merge_size": 2,
             "image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    return folder
