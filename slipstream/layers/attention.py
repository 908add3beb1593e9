"""Full attention over paged KV: rotary, optional QK-norm and output gate; knows no sequence beyond its rows.

T rows of a batch, E rows that decode, B longest block table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.batch import AttentionCache, ForwardBatch
from slipstream.layers.linear import ColumnLinear, Cut, RowLinear
from slipstream.layers.norm import RMSNorm
from slipstream.layers.parallel import Communicator
from slipstream.layers.traits import Traits
from slipstream.types import AttentionLayer


class Attention(nn.Module):
    """A tensor rank has its own query heads and the key and value heads that they read."""

    def __init__(self, checkpoint: Checkpoint, layer: AttentionLayer, kernels: Kernels, comm: Communicator,
                 traits: Traits) -> None:
        super().__init__()
        self.kernels = kernels
        self.kv_scales = (1.0, 1.0)  # of keys, of values; used where the cache is of FP8
        hidden, size, gated = checkpoint.hidden_size, layer.head_size, traits.gated_attention
        bias = checkpoint.attention_bias or traits.qkv_bias
        query = Cut.heads(checkpoint.num_heads, comm.shard, size)
        kv = Cut.heads(layer.kv_heads, comm.shard, size)
        self.heads, self.kv_heads, self.head_size, self.gated = len(query) // size, len(kv) // size, size, gated
        wide = Cut.heads(checkpoint.num_heads, comm.shard, 2 * size) if gated else query
        self.q_proj = ColumnLinear(hidden, wide, bias=bias)
        self.k_proj = ColumnLinear(hidden, kv, bias=bias)
        self.v_proj = ColumnLinear(hidden, kv, bias=bias)
        self.o_proj = RowLinear(query, hidden, comm, bias=checkpoint.attention_bias)
        if traits.qk_norm:
            self.q_norm: nn.Module = RMSNorm(kernels, size, checkpoint.rms_norm_eps, traits.unit_offset)
            self.k_norm: nn.Module = RMSNorm(kernels, size, checkpoint.rms_norm_eps, traits.unit_offset)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch, cache: AttentionCache) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes the batch's keys and values into the cache."""
        self.store(x, rope, batch.slot_mapping, cache)
        query, gate = self._query(x, rope)
        return self._out(self._attend(query, batch, cache), gate)

    def store(self, x: Tensor, rope: tuple[Tensor, Tensor], slot_mapping: Tensor, cache: AttentionCache) -> None:
        """Write the keys and values of x [T, hidden] at slot_mapping [T]."""
        tokens = x.shape[0]
        key = self.kernels.rotary(self.k_norm(self.k_proj(x).view(tokens, self.kv_heads, self.head_size)), *rope)
        value = self.v_proj(x).view(tokens, self.kv_heads, self.head_size)
        self.kernels.write_kv(cache.kv, key, value, slot_mapping, self.kv_scales)

    def decode(self, x: Tensor, rope: tuple[Tensor, Tensor], block_tables: Tensor, rows: Tensor, cache: AttentionCache, *,
               first_row: int) -> Tensor:
        """One token each of E sequences, at `rows` [E] of block_tables [E, B]: [E, hidden] -> [E, hidden]. What it and the rows
        from `first_row` on up to it have is in the cache."""
        query, gate = self._query(x, rope)
        out = self.kernels.decode_attention(query, cache.kv, block_tables, rows + 1, self.kv_scales, first_row)
        return self._out(out, gate)

    def _query(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """[T, H, D], and the gate of what comes out, alike."""
        tokens = x.shape[0]
        query, gate = self.q_proj(x), None
        if self.gated:
            query, gate = query.view(tokens, self.heads, 2 * self.head_size).chunk(2, -1)
        return self.kernels.rotary(self.q_norm(query.reshape(tokens, self.heads, self.head_size)), *rope), gate

    def _out(self, out: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            out = out * gate.sigmoid()
        result: Tensor = self.o_proj(out.flatten(1))
        return result

    def _attend(self, query: Tensor, batch: ForwardBatch, cache: AttentionCache) -> Tensor:
        split = batch.split
        if not split.chunks:
            return self.kernels.decode_attention(query, cache.kv, batch.block_tables, split.decode_lengths, self.kv_scales, 0)
        out = torch.empty_like(query)
        for sequence, rows in split.chunks:
            out[rows] = self.kernels.prefill_attention(query[rows], cache.kv, batch.block_tables[sequence],
                                                       batch.context_lens[sequence], self.kv_scales)
        if len(split.decoding):
            decoded = self.kernels.decode_attention(query[split.decode_rows], cache.kv, batch.block_tables[split.decoding],
                                                    split.decode_lengths, self.kv_scales, 0)
            out.index_copy_(0, split.decode_rows, decoded)
        return out
