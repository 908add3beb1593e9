"""Qwen language models over the shared layers; knows no file and no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.attention import Attention
from slipstream.layers.batch import AttentionCache, ForwardBatch, LayerCache, LinearCache
from slipstream.layers.embedding import Vocabulary
from slipstream.layers.gated_delta import GatedDeltaNet
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.moe import SparseMLP
from slipstream.layers.norm import RMSNorm
from slipstream.layers.parallel import Alone, Communicator
from slipstream.layers.rope import Rotary
from slipstream.layers.traits import Traits
from slipstream.models.vision import VisionTower
from slipstream.models.windowed_vision import WindowedTower
from slipstream.sharding import deepstack_levels
from slipstream.types import AttentionLayer, KvScales


class DecoderLayer(nn.Module):
    """Pre-norm: mixer (attention or Gated DeltaNet), then SwiGLU or experts."""

    def __init__(self, checkpoint: Checkpoint, index: int, kernels: Kernels, comm: Communicator, traits: Traits) -> None:
        super().__init__()
        spec, hidden, eps = checkpoint.layers[index], checkpoint.hidden_size, checkpoint.rms_norm_eps
        if isinstance(spec, AttentionLayer):
            self.self_attn = Attention(checkpoint, spec, kernels, comm, traits)
        else:
            self.linear_attn = GatedDeltaNet(checkpoint, spec, kernels, comm, traits)
        self.is_attention = isinstance(spec, AttentionLayer)
        experts = checkpoint.experts_of(index)
        self.mlp = (GatedMLP(kernels, hidden, checkpoint.intermediate_size, comm) if experts is None
                    else SparseMLP(kernels, hidden, experts, comm))
        self.input_layernorm = RMSNorm(kernels, hidden, eps, traits.unit_offset)
        self.post_attention_layernorm = RMSNorm(kernels, hidden, eps, traits.unit_offset)

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
    """What one rank holds of embedding, layers and final norm; layers are numbered as in the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels, comm: Communicator, traits: Traits) -> None:
        super().__init__()
        self.shard = comm.shard
        self.hidden_size, self.levels = checkpoint.hidden_size, deepstack_levels(checkpoint, comm.shard)
        if self.shard.first or (self.shard.last and checkpoint.tie_embeddings):  # a tied head is a copy of the embedding
            self.embed_tokens = Vocabulary(checkpoint.vocab_size, checkpoint.hidden_size, comm)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(checkpoint, i, kernels, comm, traits) for i in self.shard.layers})
        if self.shard.last:
            self.norm = RMSNorm(kernels, checkpoint.hidden_size, checkpoint.rms_norm_eps, traits.unit_offset)
        self.rotary = Rotary(checkpoint.rope)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], on_layer: Callable[[int], None] | None,
                hidden: Tensor | None) -> Tensor:
        """Hidden states [T, hidden] after the stage's layers; on the last stage normed, and only of `batch.logit_rows`.

        Between stages they are followed by the M rows of each deepstack feature that later layers add: [T + L * M, hidden].
        """
        x, features = self._begin(batch, hidden)
        rope = self.rotary(batch.positions, x.dtype)
        for i, layer, cache in zip(self.shard.layers, self.layers.values(), caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = layer.mix(x, rope, batch, cache)
            if on_layer is not None:
                on_layer(i)
            end = self.shard.last and i == self.shard.layers[-1]
            if end and not features:
                x = x[batch.logit_rows]
            x = layer(x)
            if features:
                assert batch.visual_rows is not None
                x = x.index_add(0, batch.visual_rows, features.pop(0))
                x = x[batch.logit_rows] if end else x
        result: Tensor = self.norm(x) if self.shard.last else torch.cat([x, *features]) if features else x
        return result

    def _begin(self, batch: ForwardBatch, hidden: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [T, hidden] before the stage's layers, and the [M, hidden] that are added after them, in order."""
        if not self.shard.first:
            assert hidden is not None
            rows = [len(batch.visual_rows)] * self.levels if batch.visual_rows is not None else []
            x, *features = torch.split(hidden, [len(batch.token_ids), *rows])
            return x, features
        x = self.embed_tokens(batch.token_ids)
        if batch.visual_rows is None:
            return x, []
        assert batch.visual_embeds is not None
        x[batch.visual_rows], *features = torch.split(batch.visual_embeds.to(x.dtype), self.hidden_size, -1)
        return x, features


class CausalLM(nn.Module):
    """One rank's part of a text-only model. It has no `encode_images`, so image input is refused instead of ignored."""

    traits = Traits()
    takes_pictures = False
    takes_experts = False
    takes_linear_layers = False
    takes_mrope = False
    takes_deepstack = False
    takes_windows = False
    drafts = False

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels, comm: Communicator | None = None) -> None:
        """`comm` None: the only rank."""
        super().__init__()
        self.kernels = kernels
        self.comm = comm = comm or Alone(len(checkpoint.layers))
        self.model = Decoder(checkpoint, kernels, comm, self.traits)
        own_head = comm.shard.last and not checkpoint.tie_embeddings
        self.lm_head = Vocabulary(checkpoint.vocab_size, checkpoint.hidden_size, comm) if own_head else None

    def scale_kv(self, scales: KvScales) -> None:
        """Write keys and values to caches in FP8 by these scales."""
        for index, layer in self.model.layers.items():
            assert isinstance(layer, DecoderLayer)
            if layer.is_attention:
                layer.self_attn.kv_scales = scales[int(index)]

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], on_layer: Callable[[int], None] | None = None, *,
                hidden: Tensor | None = None) -> Tensor | None:
        """Logits of `batch.logit_rows`, [R, vocab] float32, on tensor rank 0 of the last stage; None elsewhere.

        `caches`: of this rank's layers. `on_layer(i)`: layer i of the checkpoint has written its caches for this batch.
        `hidden`: what the stage before has sent (see Decoder.forward); the first stage embeds instead. All but the last stage
        send on.
        """
        x: Tensor = self.model(batch, caches, on_layer, hidden)
        if not self.comm.shard.last:
            self.comm.send(x)
            return None
        return (self.lm_head or self.model.embed_tokens).logits(x)


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5 dense: full attention with biases, one-dimensional positions."""

    traits = Traits(qk_norm=False, qkv_bias=True)


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 dense: full attention with QK-norm, one-dimensional positions."""


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3 with experts."""

    takes_experts = True


class Qwen3NextForCausalLM(CausalLM):
    """Gated DeltaNet beside gated full attention, experts beside a shared one, one-dimensional positions."""

    traits = Traits(unit_offset=True, gated_attention=True, fused_projections=True)
    takes_experts = True
    takes_linear_layers = True


class Qwen3_5ForCausalLM(CausalLM):
    """Qwen3.5 text-only: Gated DeltaNet beside gated full attention."""

    traits = Traits(unit_offset=True, gated_attention=True)
    takes_linear_layers = True
    takes_mrope = True


class ConditionalGeneration(CausalLM):
    """With a vision tower, which rank 0 alone holds."""

    takes_pictures = True
    tower: type[VisionTower | WindowedTower] = VisionTower

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels, comm: Communicator | None = None) -> None:
        super().__init__(checkpoint, kernels, comm)
        if checkpoint.vision is None or checkpoint.image is None:
            raise CheckpointError(f"{type(self).__name__} needs a vision_config in config.json")
        if checkpoint.vision.out_hidden_size != checkpoint.hidden_size:
            raise CheckpointError(f"vision_config.out_hidden_size is {checkpoint.vision.out_hidden_size}, the language model's "
                                  f"hidden_size {checkpoint.hidden_size}")
        self.visual = self.tower(checkpoint.vision, checkpoint.image, kernels) if self.comm.shard.rank == 0 else None

    def encode_images(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """uint8 [H, W, 3] images and [F, H, W, 3] videos -> one [tokens, (1 + deepstack) * hidden] each. On rank 0.

        A tower knows no time but in a patch: each group of frames of a video is one more image to it.
        """
        assert self.visual is not None
        size = self.visual.patches.config.temporal_patch_size
        groups = [[item] if item.ndim == 3 else [item[i:i + size] for i in range(0, len(item), size)] for item in pixels]
        encoded = iter(self.visual([group for video in groups for group in video]))
        return [torch.cat([next(encoded) for _ in video]) for video in groups]


class Qwen2VLForConditionalGeneration(ConditionalGeneration):
    """Qwen2-VL: Qwen2 with M-RoPE in sections."""

    traits = Qwen2ForCausalLM.traits
    tower = WindowedTower
    takes_mrope = True


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Qwen2.5-VL: the same with a tower that attends in windows."""

    takes_windows = True


class Qwen3VLForConditionalGeneration(ConditionalGeneration):
    """Qwen3-VL dense: Qwen3 with M-RoPE, and a tower whose inner blocks reach the first layers too."""

    takes_mrope = True
    takes_deepstack = True


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Qwen3-VL with experts."""

    takes_experts = True


class Qwen3_5ForConditionalGeneration(ConditionalGeneration):
    """Qwen3.5 with pictures."""

    traits = Qwen3_5ForCausalLM.traits
    takes_linear_layers = True
    takes_mrope = True


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 text-only with experts beside a shared one."""

    takes_experts = True


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    """The same with the vision tower."""

    takes_experts = True
