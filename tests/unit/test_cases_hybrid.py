"""Recurrent and conv state, case by case: what a slot holds, how it is cut, what a rank needs of it.

Case numbers are those of tests/CASES.md.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_transfer import plan
from cache_transfer.layout import CacheLayout, Kind, differences
from cache_transfer.memory import CacheMemory
from slipstream import checkpoint as checkpoints
from slipstream import sharding
from slipstream.checkpoint import Checkpoint
from slipstream.config import Config, EngineConfig, ModelConfig
from slipstream.engine import build, caches
from slipstream.errors import ConfigError
from slipstream.layers.batch import AttentionCache, LayerCache, LinearCache
from slipstream.layers.parallel import Communicator
from slipstream.models import registry
from slipstream.sharding import Geometry, Shard
from slipstream.types import AttentionLayer, LayerSpec, LinearLayer
from tests.support import ranks
from tests.support.engine_driver import poison, request, run
from tests.support.engine_pair import Pair
from tests.support.plain import Plain
from tests.support.small import hybrid_checkpoint, random_model
from tests.support.toy_engine import expected, make, text
from worker.replica import cache_layout

CPU = torch.device("cpu")
QWEN3_5_4B = LinearLayer(name="", key_heads=16, value_heads=32, key_head_size=128, value_head_size=128, conv_width=4)


def layers(count: int, attention: range, linear: LinearLayer = QWEN3_5_4B) -> tuple[LayerSpec, ...]:
    return tuple(AttentionLayer(name=f"layers.{i}", kv_heads=2, head_size=16) if i in attention
                 else dataclasses.replace(linear, name=f"layers.{i}") for i in range(count))


def layout(held: tuple[LayerSpec, ...], **more: Any) -> CacheLayout:
    return CacheLayout(model_name="m", weights_revision="r", layers=held, block_size=4,
                       **{"kv_dtype": "bfloat16", "conv_dtype": "bfloat16"} | more)


def test_the_conv_state_is_cut_segment_by_segment() -> None:
    """HY-01: channels q | k | v of 4, 4 and 8, numbered 0 to 15, one column; one rank to two, and back."""
    one = LinearLayer(name="layers.0", key_heads=2, value_heads=2, key_head_size=2, value_head_size=4, conv_width=2)
    of = layout((one,), conv_dtype="float32")
    geometries = {tp: Geometry(tp=tp, stages=(1,)) for tp in (1, 2)}

    def memory(tp: int, rank: int, channels: Tensor) -> CacheMemory:
        shard = Shard(geometry=geometries[tp], rank=rank)
        return CacheMemory(of, {"layers.0.conv": channels[None, :, None].clone(),
                                "layers.0.recurrent": torch.zeros(1, 2 // tp, 2, 4)}, shard)

    def moved(sources: list[Tensor], tp: int) -> list[list[float]]:
        found = []
        for rank in range(tp):
            here = torch.full((16 // tp,), -1.0)
            shard = Shard(geometry=geometries[tp], rank=rank)
            for there, copies in plan.plan(of, geometries[len(sources)], shard).items():
                theirs = sources[there].numpy().tobytes()
                for copy in copies:
                    for at_source, at_here, size in copy.parts if copy.spec.kind is Kind.CONV else ():
                        here[at_here // 4 : (at_here + size) // 4] = torch.from_numpy(
                            np.frombuffer(theirs[at_source : at_source + size], np.float32).copy())
            assert memory(tp, rank, here) is not None, "a rank's tensor has this shape"
            found.append(here.tolist())
        return found

    everything = torch.arange(16, dtype=torch.float32)
    halves = moved([everything], 2)
    assert halves == [[0, 1, 4, 5, 8, 9, 10, 11], [2, 3, 6, 7, 12, 13, 14, 15]]
    assert moved([torch.tensor(half) for half in halves], 1) == [everything.tolist()]


def test_what_was_received_is_there_at_the_first_step() -> None:
    """HY-02: states and rows at the end of prefill are those that decode's first step reads."""
    prefill, decode = make(prefill_chunk_tokens=4)[0], make()[0]
    poison(decode)
    pair = Pair(prefill, decode)
    seen: list[float] = []
    forward = decode._runner._model.forward

    def watched(batch: Any, held: Any, *args: Any, **named: Any) -> Any:
        seen.append(float(next(cache for cache in held if isinstance(cache, LinearCache)).recurrent[batch.sources[0], 0, 0, 0]))
        return forward(batch, held, *args, **named)

    decode._runner._model.forward = watched  # type: ignore[method-assign,assignment]
    asked = request("r", text(4, 11), 3)
    pair.submit(asked, ())
    while not pair.waiting and not seen:
        pair.step()
    slot = pair.recorders[asked.id].place[1]
    assert slot is not None
    sent = next(cache for cache in prefill.caches if isinstance(cache, LinearCache)).recurrent[slot, 0, 0, 0]
    pair.run()
    assert seen[0] == float(sent) != 0
    assert pair.tokens["r", 0] == expected(text(4, 11), 3)


@pytest.mark.parametrize(("said", "conv", "recurrent"), [({}, torch.bfloat16, torch.float32),
                                                         ({"state_dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16)])
def test_conv_and_recurrent_dtypes_are_their_own(said: dict[str, str], conv: torch.dtype, recurrent: torch.dtype,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    """HY-04: conv in the model's dtype, states in float32; another wish is warned of, and is another layout."""
    config = Config(engine=EngineConfig(kv_cache_tokens=512, max_running=2, **said))  # type: ignore[arg-type]
    demo = checkpoints.read(checkpoints.DEMO)
    with caplog.at_level(logging.WARNING):
        engine = build.build(demo, ModelConfig(device="cpu", dtype="bfloat16"), config.engine)
    found = {(cache.conv.dtype, cache.recurrent.dtype) for cache in engine.caches if isinstance(cache, LinearCache)}
    assert found == {(conv, recurrent)}
    assert ["state_dtype is bfloat16" in record.getMessage() for record in caplog.records] == [True] * bool(said)
    engine.submit(request("r", range(40, 90), 4))
    assert len(run(engine).tokens["r"]) == 4
    usual, ours = (cache_layout(one, demo, "demo", "bfloat16") for one in (Config(), config))
    assert (ours.conv_dtype, ours.recurrent_dtype) == ("bfloat16", str(recurrent).removeprefix("torch."))
    assert (usual.hash == ours.hash) == (not said)
    assert ("recurrent_dtype: ours float32, theirs bfloat16" in differences(usual.fields(), ours.fields())) == bool(said)


def test_the_default_state_keeps_what_the_storage_dtype_loses() -> None:
    """HY-05: 2,000 tokens one by one through a real layer, whose slots an engine allocated, against float64."""
    spec = dataclasses.replace(hybrid_checkpoint(), layers=hybrid_checkpoint().layers[:1])
    layer: Any = random_model(spec).model.layers["0"].linear_attn
    layer.A_log.fill_(-3.0)  # a slow decay: the state remembers
    generator = torch.Generator().manual_seed(1)
    off: dict[str, float] = {}
    held: dict[str, Any] = {}
    exact = torch.zeros(4, 8, 8, dtype=torch.float64)
    for name in ("float32", "bfloat16"):
        config = EngineConfig(state_dtype=name)
        (held[name],) = caches.allocate(spec.layers, config, 1, torch.float32, CPU)
    for _ in range(2000):
        qkv = torch.randn(1, 64, generator=generator)
        decay, beta = layer._decay(torch.randn(1, 4, generator=generator)), torch.rand(1, 4, generator=generator)
        one = torch.zeros(1, dtype=torch.int64)
        before = held["float32"].conv.clone()
        outs = {name: layer._step(qkv, decay, beta, one, one, cache) for name, cache in held.items()}
        y, _ = layer.kernels.causal_conv(qkv[:, None], before, layer.conv1d.weight[:, 0])
        q, k, v = (part[0].double() for part in layer._heads(y[:, 0]))
        exact = exact * decay[0].double().exp()[:, None, None]
        update = (v - torch.einsum("vke,vk->ve", exact, k)) * beta[0].double()[:, None]
        exact = exact + k[..., None] * update[:, None]
        right = torch.einsum("vke,vk->ve", exact, q)
        off = {name: float((out[0].double() - right).norm() / right.norm()) for name, out in outs.items()}
    assert off["float32"] < 1e-3
    assert off["bfloat16"] > 1e-3, "what is asked for is what one gets"


@pytest.mark.parametrize("steps", [False, True])
def test_in_bfloat16_only_what_goes_in_and_out_is_rounded(steps: bool) -> None:
    """Facts: norms, decay and state are float32 in a bfloat16 model; in chunks and token by token, against float64."""
    spec = dataclasses.replace(hybrid_checkpoint(), layers=hybrid_checkpoint().layers[:1])
    layer: Any = random_model(spec, dtype=torch.bfloat16).model.layers["0"].linear_attn
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(70, 64, generator=generator).bfloat16()
    a, beta = torch.randn(70, 4, generator=generator).bfloat16(), torch.rand(70, 4, generator=generator)
    decay = layer._decay(a)
    assert torch.equal(decay, -layer.A_log.float().exp() * torch.nn.functional.softplus(a.float() + layer.dt_bias.float()))
    (cache,) = caches.allocate(spec.layers, EngineConfig(), 1, torch.bfloat16, CPU)
    assert isinstance(cache, LinearCache)
    y, _ = layer.kernels.causal_conv(qkv[None], cache.conv[:1], layer.conv1d.weight[:, 0])
    q, k, v = (part.reshape(70, heads, 8).double() for part, heads in zip(y[0].split([16, 16, 32], -1), (2, 2, 4), strict=True))
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(2, 1) for x in (q, k))
    state, exact = torch.zeros(4, 8, 8, dtype=torch.float64), []
    for t in range(70):
        state = state * decay[t].double().exp()[:, None, None]
        update = (v[t] - torch.einsum("vke,vk->ve", state, k[t])) * beta[t].double()[:, None]
        state = state + k[t][..., None] * update[:, None]
        exact.append(torch.einsum("vke,vk->ve", state, q[t] * 8**-0.5))
    one = torch.zeros(1, dtype=torch.int64)
    out = (torch.cat([layer._step(qkv[t : t + 1], decay[t : t + 1], beta[t : t + 1], one, one, cache) for t in range(70)])
           if steps else layer._chunk(qkv, decay, beta, None, 0, cache))
    right = torch.stack(exact)
    assert out.dtype == torch.bfloat16
    assert bool(((out.double() - right).abs() <= right.abs() * 2.0**-8 + 1e-6).all()), "half a unit in the last place"
    torch.testing.assert_close(cache.recurrent[0].double(), state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "state"), [(1, 51_511_296), (100_000, 51_511_296)])
def test_a_state_has_one_size_however_long_the_text(tokens: int, state: int) -> None:
    """Facts: (32 * 128 * 128 * 4 + 8192 * 3 * 2) * 24 bytes of Qwen3.5-4B; three columns of raw inputs, [heads, K, V]."""
    assert state == (32 * 128 * 128 * 4 + 8192 * 3 * 2) * 24
    assert layout(layers(24, range(0))).bytes_necessary(tokens) == (0, state)
    assert "recurrent[slot,value_head,key,value]" in layout(()).memory_order, "vLLM's and AITER's is the other way round"


def test_a_stage_pays_for_its_own_states_and_all_have_the_same_slots() -> None:
    """HY-13: 48 layers of which 36 have states, on four stages: each holds a quarter, so memory holds four times as many."""
    linear = LinearLayer(name="", key_heads=2, value_heads=2, key_head_size=4, value_head_size=4, conv_width=4)
    checkpoint = dataclasses.replace(hybrid_checkpoint(), layers=layers(48, range(3, 48, 4), linear))
    config = EngineConfig(kv_cache_tokens=64, max_running=6)
    slots = caches.num_state_slots(checkpoint, config)
    assert slots == 6

    def states(held: tuple[LayerSpec, ...]) -> list[LayerCache]:
        return [one for one in caches.allocate(held, config, slots, torch.float32, CPU) if isinstance(one, LinearCache)]

    def size(held: list[LayerCache]) -> int:
        return sum(tensor.nbytes for cache in held for tensor in ranks.tensors_of(cache))

    geometry = sharding.plan(checkpoint, tp=1, pp=4)
    parts = [states(Shard(geometry=geometry, rank=rank).specs(checkpoint.layers)) for rank in range(4)]
    assert [len(part) for part in parts] == [9] * 4
    assert {len(cache.conv) for part in parts for cache in part if isinstance(cache, LinearCache)} == {slots}
    assert size(states(checkpoint.layers)) == sum(map(size, parts)) == 4 * max(map(size, parts))


def compute(checkpoint: Checkpoint, comm: Communicator | None = None) -> tuple[Tensor, Plain]:
    model = registry.load(checkpoint, dtype=torch.float32, device=CPU, comm=comm)
    plain = Plain(model=model, checkpoint=checkpoint)
    prompt = plain.prefill(list(range(40, 90)), chunk=23)
    return torch.cat([prompt, *(plain.decode(token)[None] for token in (50, 51, 52))]), plain


@pytest.mark.parametrize("stages", [(2, 2, 2, 2), (3, 3, 2), (7, 1), (1, 4, 3), (5, 3)])
def test_any_cut_into_stages_is_the_whole_model(stages: tuple[int, ...]) -> None:
    """HY-14, HY-19, LD-14, LD-15, LD-16: stages without attention, without states, of different mixtures; what a stage needs
    to know of a sequence comes with the batch, whatever its first layer is."""
    demo = checkpoints.read(checkpoints.DEMO)
    assert [i for i, layer in enumerate(demo.layers) if isinstance(layer, AttentionLayer)] == [3, 7]
    expected, whole = compute(demo)
    geometry = sharding.plan(demo, tp=1, pp=len(stages), stages=stages)
    found = ranks.run(geometry, lambda comm: compute(demo, comm))
    torch.testing.assert_close(found[-1][0], expected, rtol=1e-4, atol=1e-4)
    held = [cache for _, plain in found for cache in plain.caches]
    assert [type(cache) for cache in held] == [type(cache) for cache in whole.caches], "every layer once, in order"
    assert {cache.kv.shape[3] for cache in held if isinstance(cache, AttentionCache)} == {16}, "one size of block"


@pytest.mark.parametrize(("cap", "asked"), [(4, 8), (1, 3)])
def test_no_more_sequences_than_slots(cap: int, asked: int) -> None:
    """HY-15: the others wait, and all are answered."""
    prefill, decode = make(max_running=asked)[0], make(max_running=cap)[0]
    pair = Pair(prefill, decode)
    for number in range(asked):
        pair.submit(request(f"r{number}", text(number, 7), 6), ())
    most = 0
    while pair.open:
        pair.step()
        load = decode.load()
        assert load.total_state_slots == cap
        most = max(most, load.total_state_slots - load.free_state_slots)
    assert most == cap
    assert {name: tokens for (name, _), tokens in pair.tokens.items()} == {
        f"r{number}": expected(text(number, 7), 6) for number in range(asked)}


def test_a_state_is_final_once_after_the_last_chunk_and_has_no_token_twice() -> None:
    """HY-16: three chunks; states are told of as final once; the first two tokens of decode are those of one worker."""
    prefill, decode = make(prefill_chunk_tokens=4)[0], make()[0]
    pair = Pair(prefill, decode)
    asked = request("r", text(2, 11), 3)
    pair.submit(asked, ())
    pair.run()
    told = [(call[2], call[3]) for call in pair.recorders[asked.id].calls if call[:2] == ("layer", 0)]
    assert told == [(4, False), (8, False), (11, True)]
    assert pair.tokens["r", 0] == expected(text(2, 11), 3)


@pytest.mark.parametrize(("heads", "legal"), [((16, 32, 16), [1, 2, 4, 8, 16]), ((16, 48, 24), [1, 2, 4, 8])])
def test_a_tp_that_does_not_divide_is_refused_with_what_does(heads: tuple[int, int, int], legal: list[int]) -> None:
    """HY-18: of 35B-A3B's and 27B's numbers of heads; before a weight is read, for there is none."""
    keys, values, queries = heads
    linear = dataclasses.replace(QWEN3_5_4B, key_heads=keys, value_heads=values, name="layers.0")
    checkpoint = dataclasses.replace(
        hybrid_checkpoint(), path=Path("nowhere"), num_heads=queries, intermediate_size=17408,
        layers=(linear, AttentionLayer(name="layers.1", kv_heads=2 if queries == 16 else 4, head_size=256)))
    assert [tp for tp in sharding.legal_tp(checkpoint) if tp <= 16] == legal
    with pytest.raises(ConfigError, match=f"tp 3 does not cut .* evenly .*legal: {', '.join(map(str, legal))}"):
        sharding.plan(checkpoint, tp=3, pp=1)
