"""What the members of a family of models share and config.json does not say; knows no family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The defaults are Qwen3's."""

    unit_offset: bool = False
    """RMSNorm weights are stored as the distance from 1."""
    gated_attention: bool = False
    """q_proj yields, per head, the query and a gate whose sigmoid scales the head's output."""
    qk_norm: bool = True
    """Queries and keys are normalised per head."""
    qkv_bias: bool = False
    """q_proj, k_proj and v_proj have biases, whatever `attention_bias` says."""
    fused_projections: bool = False
    """Gated DeltaNet stores in_proj_qkvz and in_proj_ba, key head by key head."""
