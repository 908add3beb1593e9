"""A small hybrid model, run by hand: ragged batches, dirty slots, cuts anywhere, what is left in the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from slipstream.layers.batch import AttentionCache, ForwardBatch, LayerCache, LinearCache
from slipstream.models.qwen import CausalLM
from slipstream.types import AttentionLayer, LinearLayer
from tests.support.small import hybrid_checkpoint, random_model

CHECKPOINT = hybrid_checkpoint()
BLOCK, BLOCKS, SLOTS = 4, 70, 5
NAN = float("nan")


def caches(dtype: torch.dtype = torch.float32, fill: float = NAN) -> list[LayerCache]:
    """As an engine allocates them, but dirty: whoever reads a cell that is not his gets NaN."""
    made: list[LayerCache] = []
    for layer in CHECKPOINT.layers:
        if isinstance(layer, AttentionLayer):
            made.append(AttentionCache(kv=torch.full((BLOCKS, layer.kv_heads, 2, BLOCK, layer.head_size), fill, dtype=dtype)))
        else:
            made.append(LinearCache(
                conv=torch.full((SLOTS, sum(layer.conv_segments), layer.conv_width - 1), fill, dtype=dtype),
                recurrent=torch.full((SLOTS, layer.value_heads, layer.key_head_size, layer.value_head_size), fill)))
    return made


@dataclass
class Part:
    """What one step does for one sequence: `tokens` after `context` others; its blocks and slot follow from `owner`."""

    owner: int
    tokens: Sequence[int]
    context: int = 0
    offset: int = 0
    """Added to every position, such as an M-RoPE delta."""

    @property
    def table(self) -> list[int]:
        order: list[int] = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        return order[self.owner * 13 : self.owner * 13 + 13]


def batch(parts: Sequence[Part]) -> ForwardBatch:
    places = [(part, part.context + i) for part in parts for i in range(len(part.tokens))]
    return ForwardBatch(
        token_ids=torch.tensor([token for part in parts for token in part.tokens]),
        positions=torch.tensor([[place + part.offset] * 3 for part, place in places], dtype=torch.int32),
        query_lens=tuple(len(part.tokens) for part in parts), context_lens=tuple(part.context for part in parts),
        block_tables=torch.tensor([part.table for part in parts], dtype=torch.int32),
        slot_mapping=torch.tensor([part.table[place // BLOCK] * BLOCK + place % BLOCK for part, place in places]),
        state_slots=torch.tensor([part.owner for part in parts]), logit_rows=torch.arange(len(places)))


@torch.inference_mode()
def step(model: CausalLM, state: list[LayerCache], *parts: Part) -> Tensor:
    logits: Tensor = model(batch(parts), state)
    assert logits.dtype == torch.float32
    return logits


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, CHECKPOINT.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def model() -> CausalLM:
    torch.set_num_threads(1)
    return random_model(CHECKPOINT)


def alone(model: CausalLM, tokens: Sequence[int], cuts: Sequence[int] = (), owner: int = 0) -> tuple[Tensor, list[LayerCache]]:
    """Logits of every token of one sequence, cut at `cuts`, and the caches that it leaves."""
    state, out = caches(), []
    edges = [0, *cuts, len(tokens)]
    for start, end in pairwise(edges):
        out.append(step(model, state, Part(owner, tokens[start:end], start)))
    return torch.cat(out), state


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 17])
def test_every_cut_gives_the_same_logits_and_leaves_the_same_state(model: CausalLM, size: int) -> None:
    """Prefill and decode are one computation (HY-17); the state is that of exactly N tokens, however they came (HY-16)."""
    tokens = ids(50, 1)
    whole, left = alone(model, tokens)
    cut, left_by_cuts = alone(model, tokens, range(size, 50, size))
    close(cut, whole)
    linear, linear_by_cuts = left[0], left_by_cuts[0]
    assert isinstance(linear, LinearCache)
    assert isinstance(linear_by_cuts, LinearCache)
    close(linear_by_cuts.recurrent[0], linear.recurrent[0])
    close(linear_by_cuts.conv[0], linear.conv[0])


def test_the_conv_state_is_the_last_raw_columns(model: CausalLM) -> None:
    spec = CHECKPOINT.layers[0]
    assert isinstance(spec, LinearLayer)
    tokens = ids(9, 2)
    _, state = alone(model, tokens)
    linear = state[0]
    assert isinstance(linear, LinearCache)
    layer = model.model.layers["0"]
    with torch.inference_mode():
        raw = layer.linear_attn.in_proj_qkv(layer.input_layernorm(model.model.embed_tokens(torch.tensor(tokens))))  # type: ignore[operator,union-attr]
    close(linear.conv[0], raw[-(spec.conv_width - 1):].T)


def test_a_sequence_shorter_than_the_convolution_starts_from_zeros(model: CausalLM) -> None:
    _, state = alone(model, ids(1, 3))
    linear = state[0]
    assert isinstance(linear, LinearCache)
    assert not linear.conv[0, :, :2].any()
    assert linear.conv[0, :, 2].any()


def test_a_ragged_batch_equals_its_sequences_alone(model: CausalLM) -> None:
    """A fresh prompt on a dirty slot, a second chunk, two that decode and a fresh single token, in one step (HY-06, HY-07)."""
    tokens = [ids(count, 10 + count) for count in (11, 20, 6, 30, 1)]
    whole = [alone(model, each)[0] for each in tokens]
    state = caches()
    step(model, state, Part(1, tokens[1][:12]), Part(2, tokens[2][:5]), Part(3, tokens[3][:29]))
    found = step(model, state, Part(2, tokens[2][5:], 5), Part(0, tokens[0]), Part(1, tokens[1][12:], 12),
                 Part(3, tokens[3][29:], 29), Part(4, tokens[4]))
    close(found, torch.cat([whole[2][5:], whole[0], whole[1][12:], whole[3][29:], whole[4]]))


def test_a_slot_and_blocks_used_again_tell_nothing(model: CausalLM) -> None:
    first, second = ids(23, 4), ids(14, 5)
    fresh, _ = alone(model, second)
    state = caches()
    step(model, state, Part(0, first))
    assert torch.equal(step(model, state, Part(0, second)), fresh)


def test_the_rest_of_the_pool_is_left_alone(model: CausalLM) -> None:
    state = caches(fill=7.0)
    part = Part(2, ids(9, 6))
    step(model, state, part)
    step(model, state, Part(2, ids(1, 7), 9))
    linear, attention = state
    assert isinstance(linear, LinearCache)
    assert isinstance(attention, AttentionCache)
    others = [slot for slot in range(SLOTS) if slot != 2]
    assert (linear.conv[others] == 7.0).all()
    assert (linear.recurrent[others] == 7.0).all()
    written = torch.zeros(BLOCKS * BLOCK, dtype=torch.bool)
    written[[part.table[place // BLOCK] * BLOCK + place % BLOCK for place in range(10)]] = True
    rows = attention.kv.permute(0, 3, 1, 2, 4).reshape(BLOCKS * BLOCK, -1)
    assert (rows[~written] == 7.0).all()
    assert (rows[written] != 7.0).all()


def test_only_the_wanted_rows_have_logits_and_layers_report_in_order(model: CausalLM) -> None:
    tokens = ids(8, 8)
    whole, _ = alone(model, tokens)
    wanted = replace(batch([Part(0, tokens)]), logit_rows=torch.tensor([7, 2]))
    state, seen = caches(), []

    def on_layer(layer: int) -> None:
        cache = state[layer]
        if isinstance(cache, LinearCache):
            seen.append((layer, bool(torch.isfinite(cache.recurrent[0]).all())))
        else:
            seen.append((layer, bool(torch.isfinite(cache.kv[Part(0, ()).table[1]]).all())))

    with torch.inference_mode():
        found = model(wanted, state, on_layer)
    close(found, whole[[7, 2]])
    assert seen == [(0, True), (1, True)], "a layer reports after its caches are written"


def test_decode_positions_are_counted_and_the_delta_is_seen(model: CausalLM) -> None:
    """A shifted position changes the logits; the same shift everywhere does not, for attention is relative (MR-06)."""
    tokens = ids(21, 9)
    whole, _ = alone(model, tokens)
    state = caches()
    step(model, state, Part(0, tokens[:20]))
    kept = [LinearCache(conv=state[0].conv.clone(), recurrent=state[0].recurrent.clone()), state[1]]  # type: ignore[union-attr]
    close(step(model, state, Part(0, tokens[20:], 20)), whole[20:])
    lost = step(model, kept, Part(0, tokens[20:], 20, offset=-18))
    assert (lost - whole[20:]).abs().max() > 1e-2
    shifted = caches()
    step(model, shifted, Part(0, tokens[:20], offset=40))
    close(step(model, shifted, Part(0, tokens[20:], 20, offset=40)), whole[20:], 1e-4)


def test_in_bfloat16_the_recurrent_state_stays_float32(model: CausalLM) -> None:
    """Conv state in the model's dtype, recurrent state in float32 (HY-04)."""
    tokens = ids(30, 11)
    half = random_model(CHECKPOINT, dtype=torch.bfloat16)
    state = caches(torch.bfloat16)
    found = step(half, state, Part(0, tokens))
    linear = state[0]
    assert isinstance(linear, LinearCache)
    assert (linear.conv.dtype, linear.recurrent.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(linear.recurrent[0], linear.recurrent[0].bfloat16().float()), "it holds more than bfloat16 can"
    whole, _ = alone(model, tokens)
    near, exact = found.softmax(-1), whole.softmax(-1)
    assert (near - exact).abs().sum(-1).mean() < 0.3
