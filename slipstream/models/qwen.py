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
from slipstream.layers.batch import DraftCache, ForwardBatch, LayerCache
from slipstream.layers.embedding import Vocabulary
from slipstream.layers.parallel import Alone, Communicator
from slipstream.layers.traits import Traits
from slipstream.models.decoder import Decoder, DecoderLayer
from slipstream.models.mtp import Predictor
from slipstream.models.vision import VisionTower
from slipstream.models.windowed_vision import WindowedTower
from slipstream.types import KvScales

SCORED_ROWS = 128
"""Rows of prompts whose logits are in memory at once, each as long as the vocabulary."""


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
        drafts = checkpoint.draft is not None and comm.shard.last
        self.mtp = Predictor(checkpoint, kernels, comm, self.traits) if drafts else None
        own_head = comm.shard.last and not checkpoint.tie_embeddings
        self.lm_head = Vocabulary(checkpoint.vocab_size, checkpoint.hidden_size, comm) if own_head else None

    def scale_kv(self, scales: KvScales) -> None:
        """Write keys and values to caches in FP8 by these scales."""
        layers = {int(index): layer for index, layer in self.model.layers.items()}
        for index, layer in (layers | {len(scales) - 1: self.mtp.layer} if self.mtp is not None else layers).items():
            assert isinstance(layer, DecoderLayer)
            if layer.is_attention:
                layer.self_attn.kv_scales = scales[index]

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], on_layer: Callable[[int], None] | None = None, *,
                hidden: Tensor | None = None, on_scored: Callable[[Tensor], None] | None = None) -> Tensor | None:
        """Logits of `batch.logit_rows`, [R, vocab] float32, on tensor rank 0 of the last stage; None elsewhere. Those of the
        last `batch.scored` rows go to `on_scored` instead, at most SCORED_ROWS at once.

        `caches`: of this rank's layers. `on_layer(i)`: layer i of the checkpoint has written its caches for this batch.
        `hidden`: what the stage before has sent (see Decoder.forward); the first stage embeds instead. All but the last stage
        send on.
        """
        x, embeds = self.model(batch, caches, on_layer, hidden)
        if not self.comm.shard.last:
            self.comm.send(x)
            return None
        if self.mtp is not None:
            cache = caches[-1]
            assert isinstance(cache, DraftCache)
            self.mtp.store(embeds, x, batch, cache)
            if on_layer is not None:
                on_layer(self.comm.shard.layers[-1])
            x = x[batch.logit_rows]
        x, *scored = torch.split(x, [len(x) - batch.scored, *_pieces(batch.scored)])
        for piece in scored:
            logits = self._logits(piece)
            if logits is not None and on_scored is not None:
                on_scored(logits)
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor | None:
        return (self.lm_head or self.model.embed_tokens).logits(x)


def _pieces(rows: int) -> list[int]:
    return [min(SCORED_ROWS, rows - first) for first in range(0, rows, SCORED_ROWS)]


def draft(self: CausalLM, tokens: Tensor, hidden: Tensor, before: Tensor, block_tables: Tensor, rows: Tensor, cache: DraftCache
          ) -> tuple[Tensor, Tensor]:
    """The likeliest token after each of `tokens` [E] int64, and the output that the draft after that one goes on from; on every
    rank of the last stage. Of a token at row j: `hidden` [E, hidden] is the output for the token at j - 1, `before` [E, 3] its
    position; `rows` [E] are j, in block_tables [E, B]; its pair is written there."""
    assert self.mtp is not None, "the checkpoint was read with the layer that drafts"
    output = self.mtp(self.model.embed_tokens(tokens), hidden, before, block_tables, rows, cache)
    logits = self._logits(output)
    best = logits.argmax(-1) if logits is not None else None
    return self.comm.broadcast(best, tuple(tokens.shape), torch.int64), output


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
    drafts = True
    draft = draft


class Qwen3_5ForCausalLM(CausalLM):
    """Qwen3.5 text-only: Gated DeltaNet beside gated full attention."""

    traits = Traits(unit_offset=True, gated_attention=True)
    takes_linear_layers = True
    takes_mrope = True
    drafts = True
    draft = draft


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
    drafts = True
    draft = draft


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 text-only with experts beside a shared one."""

    takes_experts = True


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    """The same with the vision tower."""

    takes_experts = True
