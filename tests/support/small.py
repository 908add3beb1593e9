"""Hybrid models of two layers with random weights, made without transformers or files; for tests that run in milliseconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from slipstream.checkpoint import Checkpoint, ExpertConfig, RopeConfig
from slipstream.kernels import dispatch
from slipstream.models import registry
from slipstream.models.qwen import CausalLM
from slipstream.types import AttentionLayer, LinearLayer, SamplingParams


def hybrid_checkpoint() -> Checkpoint:
    """Gated DeltaNet, then gated attention; three M-RoPE axes that share the six rotated pairs; names no folder."""
    return Checkpoint(
        path=Path("none"), architecture="Qwen3_5ForCausalLM", dtype="float32", vocab_size=40, hidden_size=32,
        intermediate_size=48, experts=None, num_heads=4, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4, rotary_size=12, mrope_section=(2, 2, 2), mrope_interleaved=True),
        layers=(LinearLayer(name="layers.0", key_heads=2, value_heads=4, key_head_size=8, value_head_size=8, conv_width=4),
                AttentionLayer(name="layers.1", kv_heads=2, head_size=16)),
        tie_embeddings=False, attention_bias=False, max_context=256, eos_token_ids=frozenset(), sampling=SamplingParams(),
        vision=None, image=None, image_token_id=None, video_token_id=None, vision_start_token_id=None,
        vision_end_token_id=None)


def sparse_checkpoint() -> Checkpoint:
    """Qwen3-Next: fused projections and an MLP, then attention and experts beside a shared one."""
    small = hybrid_checkpoint()
    return dataclasses.replace(
        small, architecture="Qwen3NextForCausalLM", rope=dataclasses.replace(small.rope, mrope_section=None),
        experts=ExpertConfig(count=4, top_k=2, intermediate_size=24, shared_size=16, normalise=True, layers=frozenset({1})))


def random_model(checkpoint: Checkpoint, seed: int = 0, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Every weight is drawn, norms included."""
    generator = torch.Generator().manual_seed(seed)
    model = registry.architectures()[checkpoint.architecture](checkpoint, dispatch.choose("reference"))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.5, generator=generator)
    return model.to(dtype).eval()
