"""The language model's part of config.json: rotation, experts, layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.checkpoint.spec import ExpertConfig, RopeConfig
from slipstream.errors import CheckpointError
from slipstream.types import AttentionLayer, LayerSpec, LinearLayer


def rope(text: dict[str, Any], head_size: int, path: Path) -> RopeConfig:
    """Both spellings: `rope_parameters`, and top-level `rope_theta` with `rope_scaling`.

    M-RoPE is keyed on the section, never on the type's name: Qwen3.5 says `default`. Where keys are left out, Qwen3.5,
    Qwen3-Next and Qwen3-VL interleave the axes, and all but Qwen3-VL rotate a quarter of each head.
    """
    family = str(text.get("model_type", ""))
    hybrid = family.startswith(("qwen3_5", "qwen3_next"))
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"{path / 'config.json'}: rope type {kind!r} is not supported; known: default, mrope")
    theta = rope.get("rope_theta", text.get("rope_theta", 10000.0))
    fraction = float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25 if hybrid else 1.0)))
    rotary = int(head_size * fraction)
    assumed = text.get("mrope_section")
    section = rope.get("mrope_section", assumed if assumed and 2 * sum(assumed) == rotary else None)
    if section is not None and (len(section) != 3 or sum(section) != rotary // 2):
        raise CheckpointError(f"{path / 'config.json'}: mrope_section {section} must be three numbers that add up to "
                              f"{rotary // 2}, half of the {rotary} rotated channels")
    return RopeConfig(
        theta=float(theta), rotary_size=rotary,
        mrope_section=(int(section[0]), int(section[1]), int(section[2])) if section is not None else None,
        mrope_interleaved=bool(rope.get("mrope_interleaved", hybrid or family.startswith("qwen3_vl"))),
    )


def experts(text: dict[str, Any]) -> ExpertConfig | None:
    """Where Qwen3-MoE leaves `norm_topk_prob` out, its class does not normalise; Qwen3-Next's does; Qwen3-VL's and Qwen3.5's
    always."""
    count, kind = int(text.get("num_experts") or text.get("num_local_experts") or 0), str(text.get("model_type", ""))
    if not count:
        return None
    top_k, step = int(text["num_experts_per_tok"]), int(text.get("decoder_sparse_step") or 1)
    if not 1 <= top_k <= count:
        raise CheckpointError(f"config.json: num_experts_per_tok is {top_k}; it must be 1 to {count}, the number of experts")
    dense = {int(layer) for layer in text.get("mlp_only_layers") or ()}
    return ExpertConfig(
        count=count, top_k=top_k, intermediate_size=int(text["moe_intermediate_size"]),
        shared_size=int(text.get("shared_expert_intermediate_size") or 0),
        normalise=kind.startswith(("qwen3_5", "qwen3_vl")) or bool(text.get("norm_topk_prob", kind != "qwen3_moe")),
        layers=frozenset(i for i in range(int(text["num_hidden_layers"])) if i not in dense and (i + 1) % step == 0))


def layers(text: dict[str, Any], heads: int, head_size: int) -> tuple[LayerSpec, ...]:
    """Each layer by its kind: named in `layer_types`, or every `full_attention_interval`-th attends. Raises CheckpointError."""
    count = int(text["num_hidden_layers"])
    kinds = text.get("layer_types")
    if kinds is None:
        interval = int(text.get("full_attention_interval") or 4) if text.get("linear_num_key_heads") else None
        kinds = ["linear_attention" if interval and (i + 1) % interval else "full_attention" for i in range(count)]
    if len(kinds) != count:
        raise CheckpointError(f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers says {count}")
    layers: list[LayerSpec] = []
    for i, kind in enumerate(kinds):
        if kind == "full_attention":
            layers.append(AttentionLayer(name=f"layers.{i}", kv_heads=int(text.get("num_key_value_heads") or heads),
                                         head_size=head_size))
        elif kind == "linear_attention":
            layers.append(LinearLayer(
                name=f"layers.{i}", key_heads=int(text["linear_num_key_heads"]),
                value_heads=int(text["linear_num_value_heads"]), key_head_size=int(text["linear_key_head_dim"]),
                value_head_size=int(text["linear_value_head_dim"]),
                conv_width=int(text["linear_conv_kernel_dim"])))
        else:
            raise CheckpointError(f"config.json: layer {i} is of type {kind!r}; known: full_attention, linear_attention")
    return tuple(layers)
