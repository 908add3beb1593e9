"""A tiny configuration of every registered architecture, and checkpoints of random weights. Knows no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import Checkpoint
from slipstream.kernels import dispatch
from slipstream.models import registry

_COMMON: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
                           "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                           "max_position_embeddings": 32768, "tie_word_embeddings": False, "dtype": "float32"}
_HYBRID: dict[str, Any] = {
    **_COMMON, "head_dim": 32, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                        "mrope_interleaved": True}}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED: dict[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 64}
_VISION: dict[str, Any] = {"depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 4, "patch_size": 16,
                           "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
                           "num_position_embeddings": 16, "in_channels": 3}
_SECTIONS: dict[str, Any] = {"rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_INTERLEAVED: dict[str, Any] = {"rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def _seeing(text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    return {"text_config": text, "vision_config": {**_VISION, **vision}, "image_token_id": 500, "video_token_id": 501,
            "vision_start_token_id": 502, "vision_end_token_id": 503, "tie_word_embeddings": False, "dtype": "float32"}


TINY: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {**_COMMON, "rope_theta": 1e6},
    "Qwen3ForCausalLM": {**_COMMON, "head_dim": 16, "rope_theta": 1e6},
    "Qwen3MoeForCausalLM": {**_COMMON, **_EXPERTS, "head_dim": 16, "rope_theta": 1e6},
    "Qwen3NextForCausalLM": {**_HYBRID, **_SHARED, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}},
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5ForConditionalGeneration": _seeing(_HYBRID),
    "Qwen3_5MoeForCausalLM": {**_HYBRID, **_SHARED},
    "Qwen3_5MoeForConditionalGeneration": _seeing({**_HYBRID, **_SHARED}),
    "Qwen3VLForConditionalGeneration": _seeing({**_COMMON, "head_dim": 16, "rope_parameters": _INTERLEAVED},
                                               deepstack_visual_indexes=[0, 1]),
    "Qwen3VLMoeForConditionalGeneration": _seeing({**_COMMON, **_EXPERTS, "head_dim": 16, "rope_parameters": _INTERLEAVED},
                                                  deepstack_visual_indexes=[0, 1]),
    "Qwen2VLForConditionalGeneration": _seeing({**_COMMON, "rope_parameters": _SECTIONS}, embed_dim=48, hidden_size=64,
                                               mlp_ratio=2),
    "Qwen2_5_VLForConditionalGeneration": _seeing({**_COMMON, "rope_parameters": _SECTIONS}, window_size=64,
                                                  fullatt_block_indexes=[1]),
}


def configured(architecture: str, folder: Path, **changes: Any) -> Checkpoint:
    """Its tiny config.json, with `changes`, as the product reads it."""
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **TINY[architecture], **changes}))
    if architecture.endswith("ForConditionalGeneration"):
        (folder / "preprocessor_config.json").write_text(json.dumps(
            {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}, "patch_size": 16, "merge_size": 2,
             "image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    return checkpoints.read(folder)


def write(architecture: str, folder: Path, **changes: Any) -> Checkpoint:
    """The same with random weights beside it, which an engine can load."""
    checkpoint = configured(architecture, folder, **changes)
    generator = torch.Generator().manual_seed(0)
    model = registry.architectures()[architecture](checkpoint, dispatch.choose("reference"))
    save_file({name: torch.randn(parameter.shape, generator=generator) * 0.05 for name, parameter in model.named_parameters()},
              folder / "model.safetensors")
    return checkpoint
