"""Gated DeltaNet: a causal convolution and a recurrent state per sequence; knows no position and no block.

Projections of Qwen3.5: in_proj_qkv (rows q | k | v), in_proj_z, in_proj_b, in_proj_a. Of Qwen3-Next, for each key head and the
value heads that read it: in_proj_qkvz (rows q | k | v | z), in_proj_ba (rows b | a).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.batch import ForwardBatch, LinearCache
from slipstream.layers.linear import ColumnLinear, Cut, RowLinear
from slipstream.layers.parallel import Communicator
from slipstream.layers.traits import Traits
from slipstream.sharding import Shard, heads_of, local_spec
from slipstream.types import LinearLayer


class ConvWeight(nn.Module):
    """The depthwise kernel, stored [C, 1, W]."""

    def __init__(self, channels: Cut, width: int) -> None:
        super().__init__()
        self.weight = channels.parameter(1, width)


class GatedNorm(nn.Module):
    """Per value head over its channels: plain weight, then times silu(z)."""

    def __init__(self, kernels: Kernels, size: int, eps: float) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., size]."""
        return self.kernels.gated_rms_norm(x, gate, self.weight, self.eps)


class GatedDeltaNet(nn.Module):
    """One linear-attention layer. States are read from the sequence's source and written to its slot.

    A tensor rank has its own value heads and the key heads that they read; `spec` counts those of this rank.
    """

    def __init__(self, checkpoint: Checkpoint, layer: LinearLayer, kernels: Kernels, comm: Communicator,
                 traits: Traits) -> None:
        super().__init__()
        self.kernels, self.fused = kernels, traits.fused_projections
        hidden, shard = checkpoint.hidden_size, comm.shard
        local = local_spec(layer, shard.tp, shard.tp_rank)
        assert isinstance(local, LinearLayer)
        self.spec = local
        heads = Cut.heads(layer.value_heads, shard)
        key = Cut.heads(layer.key_heads, shard, layer.key_head_size)
        value = Cut.heads(layer.value_heads, shard, layer.value_head_size)
        if self.fused:
            self.in_proj_qkvz = ColumnLinear(hidden, by_key_head(layer, shard, 2 * layer.key_head_size, layer.value_head_size))
            self.in_proj_ba = ColumnLinear(hidden, by_key_head(layer, shard, 0, 1))
        else:
            self.in_proj_qkv = ColumnLinear(hidden, key + key + value)
            self.in_proj_z = ColumnLinear(hidden, value)
            self.in_proj_b = ColumnLinear(hidden, heads)
            self.in_proj_a = ColumnLinear(hidden, heads)
        self.conv1d = ConvWeight(key + key + value, layer.conv_width)
        self.A_log = heads.parameter()
        self.dt_bias = heads.parameter()
        self.norm = GatedNorm(kernels, layer.value_head_size, checkpoint.rms_norm_eps)
        self.out_proj = RowLinear(value, hidden, comm)

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LinearCache) -> Tensor:
        """[T, hidden] -> [T, hidden]; leaves in each slot the state after the sequence's last row."""
        qkv, z, b, a = self._project(x)
        mixed = self._mix(qkv, self._decay(a), b.float().sigmoid(), batch, cache)
        result: Tensor = self.out_proj(self.norm(mixed, z.reshape(mixed.shape)).flatten(1))
        return result

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T, hidden] -> q | k | v, [T, C]; z, [T, V * E]; b and a, [T, V]."""
        if not self.fused:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        heads, size = self.spec.key_heads, self.spec.key_head_size
        values = self.spec.value_heads // heads * self.spec.value_head_size
        parts = self.in_proj_qkvz(x).unflatten(-1, (heads, -1)).split([size, size, values, values], -1)
        q, k, v, z = (part.flatten(1) for part in parts)
        b, a = (part.flatten(1) for part in self.in_proj_ba(x).unflatten(-1, (heads, -1)).chunk(2, -1))
        return torch.cat((q, k, v), -1), z, b, a

    def _mix(self, qkv: Tensor, decay: Tensor, beta: Tensor, batch: ForwardBatch, cache: LinearCache) -> Tensor:
        """[T, V, E] in the model's dtype."""
        split = batch.split
        if not split.chunks and len(split.waves) == 1:
            return self._step(qkv, decay, beta, batch.sources, batch.state_slots, cache)
        mixed = qkv.new_empty(qkv.shape[0], self.spec.value_heads, self.spec.value_head_size)
        for sequence, rows in split.chunks:
            source = int(batch.sources[sequence]) if batch.context_lens[sequence] else None
            mixed[rows] = self._chunk(qkv[rows], decay[rows], beta[rows], source, int(batch.state_slots[sequence]), cache)
        for wave in split.waves:
            one, decoding = split.decode_rows[wave], split.decoding[wave]
            mixed.index_copy_(0, one, self._step(qkv[one], decay[one], beta[one], batch.sources[decoding],
                                                 batch.state_slots[decoding], cache))
        return mixed

    def _decay(self, a: Tensor) -> Tensor:
        """log of the state's decay, [T, V] float32, at most 0."""
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())

    def _heads(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [..., C] as q, k [..., V, K] normalised and v [..., V, E], float32."""
        spec = self.spec
        q, k, v = torch.split(y, list(spec.conv_segments), -1)
        shape = (*y.shape[:-1], spec.key_heads, spec.key_head_size)
        repeat = spec.value_heads // spec.key_heads
        q = (_unit(q.reshape(shape)) * spec.key_head_size**-0.5).repeat_interleave(repeat, -2)
        k = _unit(k.reshape(shape)).repeat_interleave(repeat, -2)
        return q, k, v.reshape(*y.shape[:-1], spec.value_heads, spec.value_head_size).float()

    def _chunk(self, qkv: Tensor, decay: Tensor, beta: Tensor, source: int | None, slot: int, cache: LinearCache) -> Tensor:
        """`source` None: from zeros."""
        conv = torch.zeros_like(cache.conv[slot]) if source is None else cache.conv[source]
        state = cache.recurrent[slot if source is None else source].float()
        state = torch.zeros_like(state) if source is None else state
        y, conv = self.kernels.causal_conv(qkv[None], conv[None], self.conv1d.weight[:, 0])
        out, state = self.kernels.gated_delta_chunks(*self._heads(y[0]), decay, beta, state)
        cache.conv[slot] = conv[0]
        cache.recurrent[slot] = state
        return out.to(qkv.dtype)

    def _step(self, qkv: Tensor, decay: Tensor, beta: Tensor, sources: Tensor, slots: Tensor, cache: LinearCache) -> Tensor:
        y, conv = self.kernels.causal_conv(qkv[:, None], cache.conv[sources], self.conv1d.weight[:, 0])
        out, state = self.kernels.gated_delta_step(*self._heads(y[:, 0]), decay, beta, cache.recurrent[sources].float())
        cache.conv.index_copy_(0, slots, conv)
        cache.recurrent.index_copy_(0, slots, state.to(cache.recurrent.dtype))
        return out.to(qkv.dtype)


def by_key_head(layer: LinearLayer, shard: Shard, key_rows: int, value_rows: int) -> Cut:
    """The rank's part of rows that lie on disk, for each key head, as `key_rows` and then twice `value_rows` for each of the
    value heads that read it."""
    readers, own = layer.value_heads // layer.key_heads, heads_of(layer.value_heads, shard.tp, shard.tp_rank)
    ranges = []
    for head in heads_of(layer.key_heads, shard.tp, shard.tp_rank):
        at = head * (key_rows + 2 * readers * value_rows)
        first, last = max(0, own.start - head * readers), min(readers, own.stop - head * readers)
        ranges.append(range(at, at + key_rows))
        for start in (at + key_rows, at + key_rows + readers * value_rows):
            ranges.append(range(start + first * value_rows, start + last * value_rows))
    return Cut(layer.key_heads * (key_rows + 2 * readers * value_rows), tuple(part for part in ranges if part))


def _unit(x: Tensor) -> Tensor:
    """L2-normalised over the last axis, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
