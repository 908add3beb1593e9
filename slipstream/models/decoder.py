"""What one rank holds of a language model between its tokens and its head; knows no family, no file and no scheduler.

T tokens of a step, M image rows, L deepstack features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.attention import Attention
from slipstream.layers.batch import AttentionCache, ForwardBatch, LayerCache, LinearCache
from slipstream.layers.embedding import Vocabulary
from slipstream.layers.gated_delta import GatedDeltaNet
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.moe import SparseMLP
from slipstream.layers.norm import RMSNorm
from slipstream.layers.parallel import Communicator
from slipstream.layers.rope import Rotary
from slipstream.layers.traits import Traits
from slipstream.sharding import visual_levels
from slipstream.types import AttentionLayer


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
    """What one rank holds of embedding, layers and final norm; layers are numbered as in the checkpoint. The one that drafts is
    none of these, but the last stage embeds for it."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels, comm: Communicator, traits: Traits) -> None:
        super().__init__()
        self.shard, self.drafts = comm.shard, checkpoint.draft is not None
        self.hidden_size, self.levels = checkpoint.hidden_size, visual_levels(checkpoint, comm.shard)
        # a tied head is a copy of the embedding
        if self.shard.first or (self.shard.last and (checkpoint.tie_embeddings or self.drafts)):
            self.embed_tokens = Vocabulary(checkpoint.vocab_size, checkpoint.hidden_size, comm)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(checkpoint, i, kernels, comm, traits) for i in self.shard.layers
                                     if i < checkpoint.depth})
        if self.shard.last:
            self.norm = RMSNorm(kernels, checkpoint.hidden_size, checkpoint.rms_norm_eps, traits.unit_offset)
        self.rotary = Rotary(checkpoint.rope)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], on_layer: Callable[[int], None] | None,
                hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Hidden states [T, hidden] after the stage's layers. On the last stage they are normed, and only of
        `batch.logit_rows`; of a model that drafts they are of all rows, and with them comes what went into the first layer.

        Between stages they are followed by what image rows need later on, M rows each: where the last stage drafts their
        embeddings, then the deepstack features that later layers add: [T + n * M, hidden].
        """
        x, picture, features = self._begin(batch, hidden)
        embeds = x if self.shard.first else None
        rope = self.rotary(batch.positions, x.dtype)
        for (number, layer), cache in zip(self.layers.items(), caches, strict=False):  # the one that drafts has the last
            assert isinstance(layer, DecoderLayer)
            i = int(number)
            x = layer.mix(x, rope, batch, cache)
            if on_layer is not None:
                on_layer(i)
            end = self.shard.last and not self.drafts and i == self.shard.layers[-1]
            if end and not features:
                x = x[batch.logit_rows]
            x = layer(x)
            if features:
                assert batch.visual_rows is not None
                x = x.index_add(0, batch.visual_rows, features.pop(0))
                x = x[batch.logit_rows] if end else x
        if not self.shard.last:
            pictures = [picture] if picture is not None and self.drafts else []
            return torch.cat([x, *pictures, *features]) if pictures or features else x, None
        return self.norm(x), self._embed(batch, picture) if self.drafts and embeds is None else embeds

    def _begin(self, batch: ForwardBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Hidden states [T, hidden] before the stage's layers; the embeddings of the image rows, [M, hidden], where they are
        known; and the [M, hidden] that are added after the layers, in order."""
        rows = batch.visual_rows
        pictures: list[Tensor] = []
        if not self.shard.first:
            assert hidden is not None
            levels = [len(rows)] * self.levels if rows is not None else []
            x, *pictures = torch.split(hidden, [len(batch.token_ids), *levels])
        elif rows is not None:
            assert batch.visual_embeds is not None
            pictures = list(torch.split(batch.visual_embeds.to(self.embed_tokens.weight.dtype), self.hidden_size, -1))
        picture = pictures.pop(0) if pictures and (self.shard.first or self.drafts) else None
        return self._embed(batch, picture) if self.shard.first else x, picture, pictures

    def _embed(self, batch: ForwardBatch, picture: Tensor | None) -> Tensor:
        """What goes into the first layer, [T, hidden]."""
        x: Tensor = self.embed_tokens(batch.token_ids)
        if picture is not None:
            assert batch.visual_rows is not None
            x[batch.visual_rows] = picture
        return x
