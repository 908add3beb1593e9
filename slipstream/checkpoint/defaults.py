"""What a model's class assumes where config.json leaves a key out: the values of transformers' configuration classes."""

from __future__ import annotations

from typing import Any

_VL_2 = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "mrope_section": (16, 24, 24), "num_key_value_heads": 8,
         "eos_token_id": 151645}
_VL_3 = {"model_type": "qwen3_vl_text", "rope_theta": 5e5, "mrope_section": (24, 20, 20), "max_position_embeddings": 128000}
_HYBRID_EXPERTS = {"head_dim": 256, "num_key_value_heads": 2, "shared_expert_intermediate_size": 512}
_TEXT: dict[str, dict[str, Any]] = {
    "Qwen2": {"num_key_value_heads": 32},
    "Qwen2VL": _VL_2,
    "Qwen2_5_VL": _VL_2,
    "Qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "Qwen3Moe": {"model_type": "qwen3_moe", "num_key_value_heads": 4},
    "Qwen3VL": {**_VL_3, "head_dim": 128, "num_key_value_heads": 32},
    "Qwen3VLMoe": {**_VL_3, "num_key_value_heads": 16},
    "Qwen3Next": {**_HYBRID_EXPERTS, "model_type": "qwen3_next"},
    "Qwen3_5": {"model_type": "qwen3_5_text", "head_dim": 256, "num_key_value_heads": 4, "mrope_section": (11, 11, 10)},
    "Qwen3_5Moe": {**_HYBRID_EXPERTS, "model_type": "qwen3_5_moe_text", "mrope_section": (11, 11, 10)},
}
_WITH_EXPERTS = ("Qwen3Moe", "Qwen3VLMoe", "Qwen3Next", "Qwen3_5Moe")
_VISION: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {"window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31)},
    "Qwen3VL": {"deepstack_visual_indexes": (8, 16, 24)},
    "Qwen3VLMoe": {"deepstack_visual_indexes": (8, 16, 24)},
}


def _family(architecture: str) -> str:
    return architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")


def text(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """The language model's keys, filled up; `mrope_section` at their top is the assumed one. Raises KeyError: no expert is
    counted, though the class has some."""
    family = _family(architecture)
    if family in _WITH_EXPERTS and not {"num_experts", "num_local_experts"} & config.keys():
        raise KeyError("num_experts")
    return {**_TEXT.get(family, {}), **config}


def vision(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """The vision tower's keys, filled up."""
    return {**_VISION.get(_family(architecture), {}), **config}


def marks(architecture: str) -> dict[str, int]:
    """The tokens that stand for pictures and around them."""
    first = 248053 if architecture.startswith("Qwen3_5") else 151652
    names = ("vision_start_token_id", "vision_end_token_id", None, "image_token_id", "video_token_id")
    return {name: first + i for i, name in enumerate(names) if name is not None}
