"""The engine's contract, on a toy model whose tokens are checksums of what the caches hold: wrong paging gives wrong tokens."""

from __future__ import annotations

import pytest
import torch

from slipstream import positions
from slipstream.engine.sampler import Draw, sample
from slipstream.errors import InternalError
from slipstream.layers.batch import LinearCache
from slipstream.types import FinishReason, Grid, MropeState, RequestId
from tests.support.engine_driver import Collector, Recorder, assert_empty, poison, request, run, split
from tests.support.toy_engine import expected, image_prompt, make, text
from tests.support.toy_model import IMAGE, MERGE, VOCAB, answer

# Tokens --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_many_at_once_are_right_for_every_chunk_size(chunk: int, hybrid: bool) -> None:
    engine, _ = make(hybrid=hybrid, prefill_chunk_tokens=chunk, kv_cache_tokens=512)
    poison(engine)
    prompts = {f"r{i}": (text(i, 1 + i * 5 % 83), 1 + i % 9) for i in range(24)}
    for name, (tokens, count) in prompts.items():
        engine.submit(request(name, tokens, count))
    found = run(engine)
    assert found.tokens == {name: expected(tokens, count, hybrid=hybrid) for name, (tokens, count) in prompts.items()}
    assert set(found.finish.values()) == {FinishReason.LENGTH}
    assert_empty(engine)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_cut_through_images(chunk: int) -> None:
    engine, model = make(prefill_chunk_tokens=chunk)
    grids = [Grid(t=1, h=4, w=6), Grid(t=1, h=8, w=2)]
    tokens, pixels, values = image_prompt(3, grids, [3, 2, 0])  # the last token of the prompt is an image's
    places, delta = positions.mrope_positions(tokens, grids, image_token_id=IMAGE, video_token_id=IMAGE + 1, merge_size=MERGE)
    assert delta < 0
    engine.submit(request("image", tokens, 6, grids=grids), pixels)
    engine.submit(request("text", text(9, 11), 6))
    found = run(engine)
    assert found.tokens == {"image": answer(values, places.tolist(), delta, 6), "text": expected(text(9, 11), 6)}
    assert model.encoded == 2, "each image is encoded once, however its prompt is cut"


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("length", [1, 4, 5])
def test_split_equals_unsplit_with_exact_counts(count: int, length: int) -> None:
    prefill, decode = make(kv_cache_tokens=256)[0], make(kv_cache_tokens=512)[0]
    poison(prefill)
    poison(decode)
    requests = [(request(f"r{i}", text(i, length), count), ()) for i in range(3)]
    found = split(prefill, decode, requests)
    assert found.tokens == {f"r{i}": expected(text(i, length), count) for i in range(3)}
    assert set(found.finish.values()) == {FinishReason.LENGTH}


def test_split_keeps_the_position_delta_of_images() -> None:
    grids = [Grid(t=1, h=6, w=4)]
    tokens, pixels, values = image_prompt(5, grids, [2, 3])
    places, delta = positions.mrope_positions(tokens, grids, image_token_id=IMAGE, video_token_id=IMAGE + 1, merge_size=MERGE)
    right = answer(values, places.tolist(), delta, 5)
    assert right != answer(values, places.tolist(), 0, 5), "the toy would notice a lost delta"
    found = split(make()[0], make()[0], [(request("r", tokens, 5, grids=grids), pixels)])
    assert found.tokens == {"r": right}


def test_a_first_token_that_stops_ends_the_request_at_prefill() -> None:
    first = expected(text(1, 6), 1)[0]
    engine, _ = make()
    recorder = Recorder()
    engine.submit(request("split", text(1, 6), 9, stop=[first]), (), recorder)
    engine.submit(request("whole", text(1, 6), 9, stop=[first]))
    engine.submit(request("ignoring", text(1, 6), 3, stop=[first], ignore_eos=True))
    found = run(engine)
    assert found.tokens == {"split": [first], "whole": [first], "ignoring": expected(text(1, 6), 3)}
    assert found.finish["split"] is found.finish["whole"] is FinishReason.STOP
    engine.release(RequestId(name="split"))
    assert_empty(engine)


def test_the_context_limit_ends_with_length() -> None:
    engine, _ = make(max_context=20)
    engine.submit(request("r", text(1, 17), 100))
    found = run(engine)
    assert found.tokens == {"r": expected(text(1, 17), 3)}
    assert found.finish == {"r": FinishReason.LENGTH}


def test_sampled_tokens_depend_on_seed_and_index_only() -> None:
    alone: dict[str, list[int]] = {}
    prompts = {f"r{i}": request(f"r{i}", text(i, 5 + i), 12, temperature=3.0, top_p=0.9, seed=i) for i in range(6)}
    for name, req in prompts.items():
        engine, _ = make()
        engine.submit(req)
        alone[name] = run(engine).tokens[name]
    engine, _ = make(max_batch_tokens=9)
    for req in prompts.values():
        engine.submit(req)
    assert run(engine).tokens == alone
    assert split(make()[0], make()[0], [(req, ()) for req in prompts.values()]).tokens == alone


def test_output_i_is_drawn_with_index_i_on_both_sides_of_a_split() -> None:
    logits = torch.linspace(0, 2, VOCAB)[None]
    req = request("r", [1, 2], 12, temperature=1.0, seed=3)
    right = [sample(logits, [Draw(params=req.sampling, choice=0, index=i)])[0] for i in range(12)]
    assert len(set(right)) > 6
    engines = []
    for _ in range(3):
        engine, model = make()
        model.forward = lambda *_, **__: logits  # type: ignore[method-assign]
        engines.append(engine)
    engines[0].submit(req)
    assert run(engines[0]).tokens == split(engines[1], engines[2], [(req, ())]).tokens == {"r": right}


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
def test_a_freed_state_slot_does_not_leak(split: bool) -> None:
    """Neither what was finished nor what was given up in the middle of its prompt is seen by who comes next (HY-06)."""
    engine, _ = make(max_running=1, prefill_chunk_tokens=4)
    for i in range(3):
        engine.submit(request(f"r{i}", text(i, 9), 4))
        run(engine)
        for cache in engine.caches:
            if isinstance(cache, LinearCache):
                assert bool(cache.recurrent.any()), "the slot still holds what the request before left"
    engine.submit(request("left", text(5, 12)), (), Recorder() if split else None)
    engine.step()
    assert engine.load().running == 1
    engine.abort(RequestId(name="left"))
    engine.submit(request("r", text(7, 9), 4))
    assert run(engine).tokens["r"] == expected(text(7, 9), 4)
    assert_empty(engine)


@pytest.mark.parametrize("steps", range(6))
def test_abort_is_legal_in_every_state(steps: int) -> None:
    engine, _ = make(prefill_chunk_tokens=4)
    engine.submit(request("whole", text(1, 10), 3))
    engine.submit(request("split", text(2, 10), 3), (), Recorder())
    reserved = request("reserved", text(3, 10), 3)
    engine.reserve(reserved)
    for _ in range(steps):
        engine.step()
    engine.submit(request("late", text(4, 10), 3))
    if steps % 2:
        engine.commit(reserved.id, first_tokens=[5], mrope=MropeState(delta=0, last_position=(9, 9, 9)))
    found = [engine.abort(RequestId(name=name)) for name in ("whole", "split", "reserved", "late", "unknown")]
    assert found == [steps < 5, True, True, True, False]
    assert_empty(engine)
    assert not engine.has_work


def test_a_reservation_covers_growth_and_refuses_when_full() -> None:
    engine, _ = make(kv_cache_tokens=64)
    first = engine.reserve(request("a", text(1, 20), 21))
    assert first is not None
    assert len(first.blocks) == 5
    assert engine.load().free_blocks == 6
    assert engine.reserve(request("b", text(1, 20), 21)) is None
    engine.abort(RequestId(name="a"))
    assert engine.reserve(request("b", text(1, 20), 21)) is not None
    engine.abort(RequestId(name="b"))
    assert_empty(engine)


def test_state_slots_bound_reservations() -> None:
    engine, _ = make(max_running=4)
    reserved = [engine.reserve(request(f"r{i}", text(i, 3))) for i in range(6)]
    assert [r is None for r in reserved] == [False] * 4 + [True] * 2
    assert sorted(r.state_slot for r in reserved if r is not None and r.state_slot is not None) == [0, 1, 2, 3]


def test_release_is_for_handed_off_prompts_only() -> None:
    engine, _ = make()
    engine.release(RequestId(name="unknown"))
    engine.submit(request("r", text(1, 5)), (), Recorder())
    with pytest.raises(InternalError, match="abort it instead"):
        engine.release(RequestId(name="r"))
    run(engine)
    engine.release(RequestId(name="r"))
    engine.release(RequestId(name="r"))
    assert_empty(engine)


# Publishing ----------------------------------------------------------------------------------------------------------


def test_the_publisher_is_told_of_every_layer_of_every_chunk_in_order() -> None:
    engine, _ = make(prefill_chunk_tokens=4)
    recorder = Recorder()
    engine.submit(request("r", text(1, 10)), (), recorder)
    assert recorder.calls == []
    run(engine)
    blocks, slot = recorder.place
    assert len(blocks) == 3
    assert slot is not None
    assert recorder.calls == [("begin", 0), ("allocated", blocks, slot, 0)] + [
        ("layer", layer, tokens, tokens == 10) for tokens in (4, 8, 10) for layer in (0, 1)]


def test_parked_prompts_are_bounded_and_ready_ones_go_first() -> None:
    engine, _ = make(kv_cache_tokens=160, parked_fraction=0.25, max_batch_tokens=64)
    recorders = [Recorder() for _ in range(4)]
    for i, recorder in enumerate(recorders):
        engine.submit(request(f"r{i}", text(i, 20)), (), recorder)  # 5 of 40 blocks each; 10 may be parked
    found = run(engine)
    assert set(found.tokens) == {"r0", "r1"}
    assert recorders[3].calls == [("begin", 0)]
    assert engine.load().parked == 2
    assert engine.step().stalled
    engine.mark_ready(RequestId(name="r3"))
    assert set(run(engine).tokens) == {"r3"}
    engine.release(RequestId(name="r0"))
    assert set(run(engine).tokens) == {"r2"}
    for i in range(1, 4):
        engine.release(RequestId(name=f"r{i}"))
    assert_empty(engine)


# Timing --------------------------------------------------------------------------------------------------------------


def test_queue_and_compute_seconds() -> None:
    now = [100.0]
    engine, model = make(max_batch_tokens=8, clock=lambda: now[0])

    def tick() -> None:
        now[0] += 1.0

    model.before_forward = tick
    engine.submit(request("first", text(1, 8), 3))
    engine.submit(request("second", text(2, 4), 1), (), Recorder())
    collector, timings = Collector(), {}
    while engine.has_work:
        result = engine.step()
        collector.add(result)
        timings.update({id.name: (t.queue_seconds, t.compute_seconds) for id, t in result.timings.items()})
    assert timings == {"first": (0.0, 3.0), "second": (1.0, 1.0)}
