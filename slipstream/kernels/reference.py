"""Plain torch for every operation: the oracle of the faster backends, and what a CPU runs. Knows no layer and no sequence.

Shape legend: T tokens, H query heads, G KV heads, D head size, R rotated channels, N blocks, P block size, S sequences,
L longest context, C channels, W conv width, V value heads, K/E key/value head size, n tokens of one chunk, X experts,
k experts of a token, I intermediate size of an expert.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels import fp8

CHUNK = 64
NO_SCALES = (1.0, 1.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """RMSNorm over the last axis; `unit_offset`: scale by 1 + weight in float32 (Qwen3.5), else by weight after the cast."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm by plain weight, then times silu(gate) in float32: the output norm of Gated DeltaNet."""
    normed = rms_norm(x, weight, eps, unit_offset=False)
    return (normed * F.silu(gate.float())).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product."""
    return F.silu(gate) * up


def top_experts(logits: Tensor, count: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Router logits [T, X] -> the `count` likeliest experts of each token, [T, k] int64, and their weights, [T, k].

    Probabilities are float32 and over all experts; `normalise`: those of a token's experts are scaled to add up to 1.
    """
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(count, -1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights.to(logits.dtype)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each token's experts, weighted and summed. x [T, H]; gate_up [X, 2 I, H], gate first; down [X, H, I]; chosen, weights
    [T, k]; an expert X, behind the last, adds nothing. Returns [T, H]; sums are float32, in the order of the experts, so that
    no token depends on its neighbours."""
    order = chosen.flatten().argsort(stable=True)
    rows = order // chosen.shape[1]
    scales = weights.flatten()[order, None].float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=len(gate_up))[: len(gate_up)].tolist()):
        if count:
            part = slice(start, start + count)
            gate, up = F.linear(x[rows[part]], gate_up[expert]).chunk(2, -1)
            out.index_add_(0, rows[part], F.linear(silu_mul(gate, up), down[expert]).float() * scales[part])
            start += count
    return out.to(x.dtype)


def rotary_axes(section: tuple[int, int, int], interleaved: bool) -> list[int]:
    """The axis (0 t, 1 h, 2 w) that drives each frequency pair, by the pair's index."""
    if not interleaved:
        return [0] * section[0] + [1] * section[1] + [2] * section[2]
    axes = [0] * sum(section)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = [axis] * len(axes[axis : 3 * section[axis] : 3])
    return axes


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of x [T, H, D] by half-split pairs; cos and sin are [T, R]; the rest passes through."""
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    first, second = rotated.chunk(2, -1)
    turned = rotated * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    return torch.cat((turned, rest), -1)


def write_kv(kv: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scales: tuple[float, float] = NO_SCALES) -> None:
    """Store keys and values [T, G, D] at slots [T] (block * P + offset, int64) of kv [N, G, 2, P, D].

    A cache of FP8 holds them divided by `scales` (of keys, of values); the reading operations multiply by them again.
    """
    if kv.dtype == fp8.E4M3:
        kv, keys, values = (each.view(torch.uint8) for each in (kv, *map(fp8.quantise, (keys, values), scales)))
    groups, _, block_size, size = kv.shape[1:]
    heads = slots[:, None] // block_size * groups + torch.arange(groups, device=slots.device)
    rows = (heads * (2 * block_size) + slots[:, None] % block_size).flatten()  # of kv as rows; a head's keys come first
    flat = kv.view(-1, size)
    flat.index_copy_(0, rows, keys.reshape(-1, size))
    flat.index_copy_(0, rows + block_size, values.reshape(-1, size))


def _numbers(stored: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values as they are read from a cache."""
    return fp8.dequantise(stored, scale, dtype) if stored.dtype == fp8.E4M3 else stored


def prefill_attention(query: Tensor, kv: Tensor, block_table: Tensor, context: int,
                      scales: tuple[float, float] = NO_SCALES) -> Tensor:
    """Causal attention of one sequence's n new tokens over `context` cached ones and themselves.

    query [n, H, D]; their keys and values are already in kv; block_table [B]. Returns [n, H, D].
    """
    n, heads, size = query.shape
    total = context + n
    groups, block_size = kv.shape[1], kv.shape[3]
    pages = kv[block_table[: -(-total // block_size)].long()]
    keys, values = (_numbers(pages[:, :, i].transpose(0, 1).reshape(groups, -1, size)[:, :total], scales[i], query.dtype)
                    for i in (0, 1))
    mask = torch.ones(n, total, dtype=torch.bool, device=query.device).tril(context)
    # With a batch axis torch takes its fused path on the CPU: four times faster, and no [H, n, L] scores in memory.
    out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask,
                                         scale=size**-0.5, enable_gqa=heads != groups)
    return out[0].transpose(0, 1)


def decode_attention(query: Tensor, kv: Tensor, block_tables: Tensor, lengths: Tensor,
                     scales: tuple[float, float] = NO_SCALES, first_row: int = 0) -> Tensor:
    """One new token for each of S sequences. query [S, H, D]; block_tables [S, B]; lengths [S] includes the new token. Rows
    before `first_row` are not attended to."""
    sequences, heads, size = query.shape
    groups, block_size = kv.shape[1], kv.shape[3]
    longest = int(lengths.max())
    pages = kv[block_tables[:, : -(-longest // block_size)].long()]
    keys, values = (_numbers(pages[:, :, :, i].transpose(1, 2).reshape(sequences, groups, -1, size), scales[i], query.dtype)
                    for i in (0, 1))
    rows = torch.arange(keys.shape[2], device=query.device)
    inside = (rows >= first_row) & (rows < lengths[:, None])
    scores = torch.einsum("sghd,sgld->sghl", query.view(sequences, groups, heads // groups, size), keys).float() * size**-0.5
    weights = scores.masked_fill(~inside[:, None, None], -math.inf).softmax(-1).to(values.dtype)
    # Rows past a sequence's end hold whatever their block held before; a weight of 0 does not cancel a NaN.
    values = values.masked_fill(~inside[:, None, :, None], 0.0)
    return torch.einsum("sghl,sgld->sghd", weights, values).reshape(sequences, heads, size)


def causal_conv(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """silu(depthwise causal convolution). x [S, n, C] raw; state [S, C, W-1] raw columns before; weight [C, W].

    Returns (y [S, n, C], the new state).
    """
    columns = torch.cat((state, x.transpose(1, 2)), -1)
    y = F.conv1d(columns, weight[:, None], groups=weight.shape[0])
    return F.silu(y).transpose(1, 2), columns[..., -state.shape[-1] :]


def gated_delta_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule for S sequences, float32.

    q, k [S, V, K] normalised (q scaled), v [S, V, E], decay (log) and beta [S, V], state [S, V, K, E].
    S <- exp(decay) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.
    """
    state = state * decay.exp()[..., None, None]
    update = (v - torch.einsum("svke,svk->sve", state, k)) * beta[..., None]
    state = state + k[..., :, None] * update[..., None, :]
    return torch.einsum("svke,svk->sve", state, q), state


def gated_delta_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule over n tokens of one sequence in chunks of CHUNK, float32.

    q, k [n, V, K], v [n, V, E], decay and beta [n, V], state [V, K, E]. Within a chunk the updates solve a unit lower
    triangular system, between chunks the state is carried (the WY form of the delta rule).
    """
    out = torch.empty_like(v)
    for start in range(0, q.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        qc, kc, vc = q[part].transpose(0, 1), k[part].transpose(0, 1), v[part].transpose(0, 1)  # [V, n, *]
        bc, total = beta[part].T[..., None], decay[part].T.cumsum(-1)
        n = qc.shape[1]
        ratio = (total[:, :, None] - total[:, None, :]).masked_fill(
            torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -math.inf).exp()
        kb = kc * bc
        system = torch.eye(n, device=q.device) + ((kb @ kc.transpose(1, 2)) * ratio).tril(-1)
        right = torch.cat((vc * bc, kb * total.exp()[..., None]), -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        update = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ state
        inside = ((qc @ kc.transpose(1, 2)) * ratio) @ update
        out[part] = ((qc * total.exp()[..., None]) @ state + inside).transpose(0, 1)
        carry = (kc * (total[:, -1:] - total).exp()[..., None]).transpose(1, 2) @ update
        state = state * total[:, -1].exp()[:, None, None] + carry
    return out, state
