"""Full attention over paged KV: QK-norm, rotary, optional output gate; knows no sequence beyond its rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.batch import AttentionCache, ForwardBatch
from slipstream.layers.linear import ColumnLinear, Cut, RowLinear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.parallel import Communicator
from slipstream.types import AttentionLayer


class Attention(nn.Module):
    """`gated`: q_proj yields, per head, the query and a gate whose sigmoid scales the head's output (Qwen3.5).

    A tensor rank has its own query heads and the key and value heads that they read.
    """

    def __init__(self, checkpoint: Checkpoint, layer: AttentionLayer, kernels: Kernels, comm: Communicator, *, gated: bool,
                 unit_offset: bool) -> None:
        super().__init__()
        self.kernels = kernels
        hidden, bias, size = checkpoint.hidden_size, checkpoint.attention_bias, layer.head_size
        query = Cut.heads(checkpoint.num_heads, comm.shard, size)
        kv = Cut.heads(layer.kv_heads, comm.shard, size)
        self.heads, self.kv_heads, self.head_size, self.gated = len(query) // size, len(kv) // size, size, gated
        wide = Cut.heads(checkpoint.num_heads, comm.shard, 2 * size) if gated else query
        self.q_proj = ColumnLinear(hidden, wide, bias=bias)
        self.k_proj = ColumnLinear(hidden, kv, bias=bias)
        self.v_proj = ColumnLinear(hidden, kv, bias=bias)
        self.o_proj = RowLinear(query, hidden, comm, bias=bias)
        self.q_norm = RMSNorm(kernels, self.head_size, checkpoint.rms_norm_eps, unit_offset)
        self.k_norm = RMSNorm(kernels, self.head_size, checkpoint.rms_norm_eps, unit_offset)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch, cache: AttentionCache) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes the batch's keys and values into the cache."""
        tokens = x.shape[0]
        query, gate = self.q_proj(x), None
        if self.gated:
            query, gate = query.view(tokens, self.heads, 2 * self.head_size).chunk(2, -1)
        query = self.kernels.rotary(self.q_norm(query.reshape(tokens, self.heads, self.head_size)), *rope)
        key = self.kernels.rotary(self.k_norm(self.k_proj(x).view(tokens, self.kv_heads, self.head_size)), *rope)
        value = self.v_proj(x).view(tokens, self.kv_heads, self.head_size)
        self.kernels.write_kv(cache.kv, key, value, batch.slot_mapping)
        out = self._attend(query, batch, cache)
        if gate is not None:
            out = out * gate.sigmoid()
        result: Tensor = self.o_proj(out.reshape(tokens, -1))
        return result

    def _attend(self, query: Tensor, batch: ForwardBatch, cache: AttentionCache) -> Tensor:
        split = batch.split
        if not split.chunks:
            return self.kernels.decode_attention(query, cache.kv, batch.block_tables, split.decode_lengths)
        out = torch.empty_like(query)
        for sequence, rows in split.chunks:
            out[rows] = self.kernels.prefill_attention(query[rows], cache.kv, batch.block_tables[sequence],
                                                       batch.context_lens[sequence])
        if len(split.decoding):
            decoded = self.kernels.decode_attention(query[split.decode_rows], cache.kv, batch.block_tables[split.decoding],
                                                    split.decode_lengths)
            out.index_copy_(0, split.decode_rows, decoded)
        return out
