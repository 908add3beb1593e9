"""The plain torch operations against slow readings of their formulas, on data that would show a swap."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from slipstream.checkpoint import RopeConfig
from slipstream.kernels import reference
from slipstream.layers.rope import Rotary

THREE_AXES = torch.tensor([[0, 0, 0], [3, 11, 29], [7, 2, 50], [1000, 3, 70]], dtype=torch.int32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def axis_of_pair(pair: int, section: tuple[int, int, int], interleaved: bool) -> int:
    """t h w t h w ... while a section lasts, t for the rest; or t's pairs, then h's, then w's."""
    if interleaved:
        return pair % 3 if pair // 3 < section[pair % 3] else 0
    return 0 if pair < section[0] else 1 if pair < section[0] + section[1] else 2


def slow_rotary(x: Tensor, positions: Tensor, theta: float, size: int, axes: list[int]) -> Tensor:
    """Pair j of a head, channels j and j + size / 2, turned by position[axis of j] * theta^(-2j / size), in float64."""
    out = x.double().clone()
    for token in range(x.shape[0]):
        for j in range(size // 2):
            angle = int(positions[token, axes[j]]) * theta ** (-2 * j / size)
            first, second = x[token, :, j].double(), x[token, :, j + size // 2].double()
            out[token, :, j] = first * math.cos(angle) - second * math.sin(angle)
            out[token, :, j + size // 2] = second * math.cos(angle) + first * math.sin(angle)
    return out


@pytest.mark.parametrize(("section", "interleaved"), [
    ((11, 11, 10), True), ((6, 5, 5), True), ((2, 1, 1), True), ((24, 20, 20), True),
    ((16, 24, 24), False), ((3, 2, 3), False), ((1, 5, 2), False)])
def test_the_axis_belongs_to_the_frequency_pair(section: tuple[int, int, int], interleaved: bool) -> None:
    """Three different axes, position 0 first; any two of them swapped would show."""
    size = 2 * sum(section)
    axes = [axis_of_pair(j, section, interleaved) for j in range(sum(section))]
    assert [axes.count(axis) for axis in range(3)] == list(section)
    rotary = Rotary(RopeConfig(theta=1e4, rotary_size=size, mrope_section=section, mrope_interleaved=interleaved))
    x = random(len(THREE_AXES), 3, size + 5)
    found = reference.rotary(x, *rotary(THREE_AXES, torch.float32))
    assert torch.equal(found[0], x[0]), "nothing turns at position 0"
    assert torch.equal(found[..., size:], x[..., size:]), "what is not rotated passes through"
    assert (found - slow_rotary(x, THREE_AXES, 1e4, size, axes)).abs().max() < 5e-4
    for swap in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
        assert (found - slow_rotary(x, THREE_AXES[:, swap], 1e4, size, axes)).abs().max() > 0.1, swap


def test_the_known_axis_tables() -> None:
    """[11, 11, 10] of Qwen3.5: t h w all along; [24, 20, 20]: t alone at the end; sectioned Qwen2-VL."""
    assert reference.rotary_axes((11, 11, 10), True) == [0, 1, 2] * 10 + [0, 1]
    assert reference.rotary_axes((24, 20, 20), True) == [0, 1, 2] * 20 + [0] * 4
    assert reference.rotary_axes((16, 24, 24), False) == [0] * 16 + [1] * 24 + [2] * 24


def test_one_dimensional_positions_use_every_pair() -> None:
    rotary = Rotary(RopeConfig(theta=1e6, rotary_size=16, mrope_section=None, mrope_interleaved=False))
    x, positions = random(3, 2, 16), torch.tensor([[0] * 3, [5] * 3, [40000] * 3], dtype=torch.int32)
    found = reference.rotary(x, *rotary(positions, torch.float32))
    assert (found - slow_rotary(x, positions, 1e6, 16, [0] * 8)).abs().max() < 2e-2
    assert (found[:2] - slow_rotary(x, positions, 1e6, 16, [0] * 8)[:2]).abs().max() < 1e-5


def slow_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [H, D] over L keys [L, G, D]; head h reads group h // (H / G)."""
    heads, size = query.shape
    out = []
    for head in range(heads):
        group = head // (heads // keys.shape[1])
        weights = (keys[:, group].double() @ query[head].double() / size**0.5).softmax(0)
        out.append(weights @ values[:, group].double())
    return torch.stack(out)


@pytest.mark.parametrize("lengths", [(1,), (4,), (5,), (17, 1, 4, 8)])
def test_attention_reads_its_blocks_and_no_others(lengths: tuple[int, ...]) -> None:
    """Written by slot, read back by prefill (last 3 tokens as a chunk) and by batched decode; all else is NaN."""
    block, groups, heads, size = 4, 2, 6, 8
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    tables = torch.zeros(len(lengths), 5, dtype=torch.int32)
    kv = torch.full((24, groups, 2, block, size), float("nan"))
    keys, values = [random(n, groups, size, seed=n) for n in lengths], [random(n, groups, size, seed=100 + n) for n in lengths]
    for i, length in enumerate(lengths):
        used = -(-length // block)
        tables[i, :used] = order[5 * i : 5 * i + used].int()
        places = torch.arange(length)
        reference.write_kv(kv, keys[i], values[i], tables[i].long()[places // block] * block + places % block)
    query = random(len(lengths), heads, size, seed=7)
    found = reference.decode_attention(query, kv, tables, torch.tensor(lengths))
    for i, length in enumerate(lengths):
        assert (found[i] - slow_attention(query[i], keys[i], values[i])).abs().max() < 1e-5
        chunk = min(3, length)
        queries = random(chunk, heads, size, seed=8)
        rows = reference.prefill_attention(queries, kv, tables[i], length - chunk)
        for j in range(chunk):
            seen = length - chunk + j + 1
            assert (rows[j] - slow_attention(queries[j], keys[i][:seen], values[i][:seen])).abs().max() < 1e-5


def slow_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S = exp(g) S;  S += k (beta (v - S^T k))^T;  o = S^T q, head by head and token by token, in float64."""
    state, out = state.double().clone(), torch.empty_like(v, dtype=torch.float64)
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            s = state[head] * math.exp(float(decay[t, head]))
            s = s + torch.outer(k[t, head].double(), float(beta[t, head]) * (v[t, head].double() - s.T @ k[t, head].double()))
            state[head], out[t, head] = s, s.T @ q[t, head].double()
    return out, state


@pytest.mark.parametrize("count", [1, 5, 63, 64, 65, 130])
def test_the_delta_rule_in_chunks_and_in_steps(count: int) -> None:
    heads, size, wide = 3, 6, 4
    q, k = (torch.nn.functional.normalize(random(count, heads, size, seed=seed), dim=-1) for seed in (1, 2))
    v, decay = random(count, heads, wide, seed=3), -random(count, heads, seed=4).abs()
    beta = random(count, heads, seed=5).sigmoid()
    start = random(heads, size, wide, seed=6)
    expected, last = slow_delta(q, k, v, decay, beta, start)
    found, state = reference.gated_delta_chunks(q, k, v, decay, beta, start)
    assert (found - expected).abs().max() < 1e-5
    assert (state - last).abs().max() < 1e-5
    state, outs = start[None], []
    for t in range(count):
        one = slice(t, t + 1)
        out, state = reference.gated_delta_step(q[one], k[one], v[one], decay[one], beta[one], state)
        outs.append(out[0])
    assert (torch.stack(outs) - expected).abs().max() < 1e-5
    assert (state[0] - last).abs().max() < 1e-5


def test_a_state_that_forgets_at_once_stays_finite() -> None:
    """exp(-200) underflows to 0; ratios of such decays inside a chunk must not become NaN."""
    q = k = torch.nn.functional.normalize(random(70, 2, 4), dim=-1)
    v, beta = random(70, 2, 4, seed=1), torch.ones(70, 2)
    found, state = reference.gated_delta_chunks(q, k, v, torch.full((70, 2), -200.0), beta, random(2, 4, 4, seed=2))
    expected, last = slow_delta(q, k, v, torch.full((70, 2), -200.0), beta, random(2, 4, 4, seed=2))
    assert (found - expected).abs().max() < 1e-5
    assert (state - last).abs().max() < 1e-5


def test_the_convolution_carries_its_last_columns() -> None:
    x, weight, state = random(2, 9, 5), random(5, 4, seed=1), random(2, 5, 3, seed=2)
    found, left = reference.causal_conv(x, state, weight)
    columns = torch.cat((state, x.transpose(1, 2)), -1)
    for t in range(9):
        raw = (columns[..., t : t + 4] * weight).sum(-1)
        assert (found[:, t] - raw * raw.sigmoid()).abs().max() < 1e-5
    assert torch.equal(left, columns[..., -3:])
    first, middle = reference.causal_conv(x[:, :2], state, weight)
    second, end = reference.causal_conv(x[:, 2:], middle, weight)
    assert torch.allclose(torch.cat((first, second), 1), found, atol=1e-6)
    assert torch.equal(end, left)


def test_the_norms_differ_in_what_the_weight_means() -> None:
    x, weight = random(3, 8) * 5, random(8, seed=1)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(reference.rms_norm(x, weight, 1e-6, False), weight * normed, atol=1e-6)
    assert torch.allclose(reference.rms_norm(x, weight, 1e-6, True), (1 + weight) * normed, atol=1e-6)
    gate = random(3, 8, seed=2)
    assert torch.allclose(reference.gated_rms_norm(x, gate, weight, 1e-6), weight * normed * gate * gate.sigmoid(), atol=1e-6)
    assert reference.rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6, True).dtype == torch.bfloat16


def test_rows_past_two_to_the_thirty_one() -> None:
    """Offsets are 64-bit: the last block of a pool of 2^31 elements is written and read (its pages are never all touched)."""
    kv = torch.empty(1 << 16, 8, 2, 16, 129, dtype=torch.bfloat16)
    assert kv.numel() > 1 << 31
    last = kv.shape[0] - 1
    keys, values = random(1, 8, 129).bfloat16(), random(1, 8, 129, seed=1).bfloat16()
    reference.write_kv(kv, keys, values, torch.tensor([last * 16 + 15]))
    assert torch.equal(kv[last, :, 0, 15], keys[0])
    assert torch.equal(kv[last, :, 1, 15], values[0])
