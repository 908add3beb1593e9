"""Qwen3 and Qwen3.5 language models over the shared layers; knows no file and no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.attention import Attention
from slipstream.layers.batch import AttentionCache, ForwardBatch, LayerCache, LinearCache
from slipstream.layers.embedding import empty_embedding
from slipstream.layers.gated_delta import GatedDeltaNet
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.norm import RMSNorm
from slipstream.layers.rope import Rotary
from slipstream.models.vision import VisionTower
from slipstream.types import AttentionLayer, LayerSpec


class DecoderLayer(nn.Module):
    """Pre-norm: mixer (attention or Gated DeltaNet), then SwiGLU."""

    def __init__(self, checkpoint: Checkpoint, spec: LayerSpec, kernels: Kernels, *, qwen3_5: bool) -> None:
        super().__init__()
        if isinstance(spec, AttentionLayer):
            self.self_attn = Attention(checkpoint, spec, kernels, gated=qwen3_5, unit_offset=qwen3_5)
        else:
            self.linear_attn = GatedDeltaNet(checkpoint, spec, kernels)
        self.is_attention = isinstance(spec, AttentionLayer)
        self.mlp = GatedMLP(kernels, checkpoint.hidden_size, checkpoint.intermediate_size)
        self.input_layernorm = RMSNorm(kernels, checkpoint.hidden_size, checkpoint.rms_norm_eps, qwen3_5)
        self.post_attention_layernorm = RMSNorm(kernels, checkpoint.hidden_size, checkpoint.rms_norm_eps, qwen3_5)

    def mix(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """The first half: after it the layer's caches are written for this batch. [T, hidden]."""
        normed = self.input_layernorm(x)
        if self.is_attention:
            assert isinstance(cache, AttentionCache)
            mixed: Tensor = self.self_attn(normed, rope, batch, cache)
        else:
            assert isinstance(cache, LinearCache)
            mixed = self.linear_attn(normed, batch, cache)
        return x + mixed

    def forward(self, x: Tensor) -> Tensor:
        """The second half. [T, hidden]."""
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels, *, qwen3_5: bool) -> None:
        super().__init__()
        self.embed_tokens = empty_embedding(checkpoint.vocab_size, checkpoint.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(checkpoint, spec, kernels, qwen3_5=qwen3_5) for spec in checkpoint.layers)
        self.norm = RMSNorm(kernels, checkpoint.hidden_size, checkpoint.rms_norm_eps, qwen3_5)
        self.rotary = Rotary(checkpoint.rope)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], on_layer: Callable[[int], None] | None) -> Tensor:
        """Hidden states of `batch.logit_rows`, [R, hidden]."""
        x = self.embed_tokens(batch.token_ids)
        if batch.visual_rows is not None:
            assert batch.visual_embeds is not None
            x[batch.visual_rows] = batch.visual_embeds.to(x.dtype)
        rope = self.rotary(batch.positions, x.dtype)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x = layer.mix(x, rope, batch, caches[i])
            if on_layer is not None:
                on_layer(i)
            if i == len(self.layers) - 1:
                x = x[batch.logit_rows]
            x = layer(x)
        result: Tensor = self.norm(x)
        return result


class CausalLM(nn.Module):
    """A text-only model. It has no `encode_images`, so image input is refused instead of ignored."""

    qwen3_5 = False
    takes_linear_layers = False
    takes_mrope = False

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.model = Decoder(checkpoint, kernels, qwen3_5=self.qwen3_5)
        hidden, vocab = checkpoint.hidden_size, checkpoint.vocab_size
        self.lm_head = None if checkpoint.tie_embeddings else nn.Linear(hidden, vocab, bias=False)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache],
                on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Logits of `batch.logit_rows`, [R, vocab] float32. `on_layer(i)`: layer i has written its caches for this batch."""
        hidden = self.model(batch, caches, on_layer)
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, head).float()


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 dense: full attention with QK-norm, one-dimensional positions."""


class Qwen3_5ForCausalLM(CausalLM):
    """Qwen3.5 text-only: Gated DeltaNet beside gated full attention."""

    qwen3_5 = True
    takes_linear_layers = True
    takes_mrope = True


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Qwen3.5 with its vision tower."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels) -> None:
        super().__init__(checkpoint, kernels)
        if checkpoint.vision is None or checkpoint.image is None:
            raise CheckpointError("Qwen3_5ForConditionalGeneration needs a vision_config in config.json")
        if checkpoint.vision.out_hidden_size != checkpoint.hidden_size:
            raise CheckpointError(f"vision_config.out_hidden_size is {checkpoint.vision.out_hidden_size}, the language model's "
                                  f"hidden_size {checkpoint.hidden_size}")
        self.visual = VisionTower(checkpoint.vision, checkpoint.image, kernels)

    def encode_images(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """uint8 [H, W, 3] images -> one [tokens, hidden] each."""
        result: list[Tensor] = self.visual(pixels)
        return result
