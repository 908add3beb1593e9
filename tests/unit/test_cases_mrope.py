"""M-RoPE through the engine, case by case: the positions, features and keys that a model is really given at each step.

Case numbers are those of tests/CASES.md.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from slipstream import checkpoint as checkpoints
from slipstream.block_hash import content_hash
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.errors import InvalidRequestError
from slipstream.layers.batch import ForwardBatch
from slipstream.models import registry
from slipstream.positions import mrope_positions
from slipstream.text import images
from slipstream.types import Grid, RequestId, TokenEvent
from tests.support import oracle, tiny
from tests.support.engine_driver import Recorder, poison, request, run
from tests.support.engine_pair import Pair
from tests.support.toy_engine import expected, image_prompt, make, picture, text
from tests.support.toy_model import IMAGE, MERGE, ToyModel, answer

Rows = list[list[int]]


def watch(model: ToyModel) -> list[Rows]:
    """Positions [T, 3] of each step from now on."""
    seen: list[Rows] = []
    forward = model.forward

    def watched(batch: ForwardBatch, *args: Any, **named: Any) -> Any:
        seen.append(batch.positions.tolist())
        return forward(batch, *args, **named)

    model.forward = watched  # type: ignore[method-assign]
    return seen


def positions(tokens: Sequence[int], grids: Sequence[Grid]) -> tuple[Rows, int]:
    found, delta = mrope_positions(tokens, grids, image_token_id=IMAGE, video_token_id=IMAGE + 1, merge_size=MERGE)
    return found.tolist(), delta


PICTURE = Grid(t=1, h=8, w=12)
"""4 x 6 tokens."""


def shown(before: int, after: int) -> tuple[GenerationRequest, list[NDArray[np.uint8]], list[int]]:
    """A request with the picture between so many tokens of text, its pixels, and the values that the toy sees."""
    tokens, pixels, values = image_prompt(3, [PICTURE], [before, after])
    name = content_hash(pixels[0].shape[0], pixels[0].shape[1], pixels[0].tobytes())
    return request("r", tokens, 6, grids=[PICTURE], images=[name]), pixels, values


def test_a_chunk_gets_its_own_columns() -> None:
    """MR-01: 40 tokens in chunks of 32 are 32 positions, then columns 32 to 39."""
    engine, model = make(prefill_chunk_tokens=32)
    seen = watch(model)
    asked, pixels, values = shown(6, 10)
    whole, delta = positions(asked.tokens, [PICTURE])
    engine.submit(asked, pixels)
    found = run(engine)
    assert seen[:2] == [whole[:32], whole[32:]]
    assert [len(rows) for rows in seen[:2]] == [32, 8]
    assert found.tokens == {"r": answer(values, whole, delta, 6)}


def test_the_delta_is_that_of_the_whole_prompt_after_every_chunk_and_travels() -> None:
    """MR-02, MR-03: 31 tokens end at position 12, so delta is -18 at any time, and decode begins at 13 on all three axes."""
    prefill, _ = make(prefill_chunk_tokens=10)
    decode, model = make()
    seen, deltas = watch(model), []
    asked, pixels, values = shown(4, 3)
    pair = Pair(prefill, decode)
    pair.submit(asked, pixels)
    while pair.open:
        if asked.id not in pair.waiting and len(pair.tokens["r", 0]) == 0:
            deltas.append(prefill.mrope(asked.id).delta)
        pair.step()
    assert len(deltas) >= 3
    assert set(deltas) == {-18}
    assert seen == [[[place] * 3] for place in range(13, 18)]
    assert pair.tokens["r", 0] == answer(values, *positions(asked.tokens, [PICTURE]), 6)


def test_a_text_after_a_picture_has_no_delta() -> None:
    """MR-05: the same slot and blocks, the answer of a worker that has just started."""
    engine, model = make(max_running=1)
    asked, pixels, _ = shown(4, 3)
    engine.submit(asked, pixels)
    run(engine)
    seen = watch(model)
    engine.submit(request("text", text(7, 9), 4))
    assert engine.mrope(RequestId(name="text")).delta == 0
    assert run(engine).tokens == {"text": expected(text(7, 9), 4)}
    assert [row for rows in seen for row in rows] == [[place] * 3 for place in range(9 + 3)]


def test_decode_counts_on_from_the_prompt() -> None:
    """MR-06: 20 tokens, then 20, 21 and so on; the longer prompt that holds the answer has its tokens."""
    engine, model = make()
    seen = watch(model)
    engine.submit(request("r", text(1, 20), 9))
    found = run(engine).tokens["r"]
    assert seen[1:] == [[[place] * 3] for place in range(20, 28)]
    engine.submit(request("whole", text(1, 20) + found[:8], 1))
    assert run(engine).tokens["whole"] == found[8:]


@pytest.mark.parametrize("more", [3, 40])
def test_a_hit_has_the_positions_of_the_whole_prompt(more: int) -> None:
    """MR-07: a picture, then the same with a question more; what is computed is the tail, where it stands in the whole."""
    engine, model = make(state_snapshots=8)
    asked, pixels, values = shown(4, 3)
    engine.submit(asked, pixels)
    run(engine)
    seen = watch(model)
    question = text(8, more)
    longer = request("longer", (*asked.tokens, *question), 3, grids=[PICTURE], images=asked.images)
    whole, delta = positions(longer.tokens, [PICTURE])
    engine.submit(longer, pixels)
    found = run(engine)
    cached = engine.counters().cached_tokens
    assert cached == 28, "whole blocks of 4"
    assert [row for rows in seen for row in rows][: len(whole) - cached] == whole[cached:]
    assert found.tokens == {"longer": answer([*values, *question], whole, delta, 3)}


def test_sixteen_pictures_of_one_size_behind_one_text() -> None:
    """MR-08: each answer is that of a replica without a cache."""
    cached, plain = make(state_snapshots=64, max_running=16)[0], make(prefix_cache=False, max_running=16)[0]
    for turn in ("first", "again"):
        found: list[dict[str, list[int]]] = []
        for engine in (cached, plain):
            for number in range(16):
                pixels = picture(number, PICTURE.h, PICTURE.w)
                name = content_hash(pixels.shape[0], pixels.shape[1], pixels.tobytes())
                tokens = [*text(1, 6), *[IMAGE] * 24, *text(2, 6)]
                engine.submit(request(f"{turn}{number}", tokens, 4, grids=[PICTURE], images=[name]), [pixels])
            found.append(run(engine).tokens)
        assert found[0] == found[1]
        assert len({tuple(tokens) for tokens in found[0].values()}) == 16
    assert cached.counters().cached_tokens > 16 * 20, "reuse is real"


def test_a_resumed_request_has_positions_for_its_output_too() -> None:
    """MR-15: preempted after 10 tokens; the prompt and the ten are computed again, the ten as text behind the prompt."""
    engine, model = make()
    asked, pixels, values = shown(4, 3)
    whole, delta = positions(asked.tokens, [PICTURE])
    right = answer(values, whole, delta, 16)
    seen = watch(model)
    engine.submit(request("again", asked.tokens, 16, grids=[PICTURE], images=asked.images, output=right[:10]), pixels)
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step().events
    assert [(event.index, event.token) for event in events] == list(enumerate(right))[10:]
    assert seen[0] == whole + [[31 + i + delta] * 3 for i in range(10)]


def test_a_prompt_one_short_of_the_context_is_computed_to_its_end(tmp_path: Path) -> None:
    """MR-18: on a real model, with transformers' logits; no table is too short."""
    folder = tiny.write("qwen3_5_vl", tmp_path)
    checkpoint = checkpoints.read(folder)
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(model, checkpoint, EngineConfig(kv_cache_tokens=512, max_running=1, max_context=300, state_snapshots=0))
    poison(engine)
    tokens = np.random.default_rng(1).integers(0, 490, 299).tolist()
    of: Any = model
    seen, forward = [], of.forward

    def watched(*args: Any, **named: Any) -> Any:
        seen.append(forward(*args, **named))
        return seen[-1]

    of.forward = watched
    engine.submit(request("r", tokens, 50, ignore_eos=True))
    expected = oracle.logits(folder, tokens)[-1]
    assert run(engine).tokens["r"] == [int(expected.argmax())]
    torch.testing.assert_close(seen[-1][0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [16, 48])
def test_deepstack_features_are_cut_with_the_chunk(chunk: int, tmp_path: Path) -> None:
    """MR-19: a picture over many chunks, then a prompt of which a part of the picture is cached: transformers' answers."""
    folder = tiny.write("qwen3_vl", tmp_path)
    checkpoint = checkpoints.read(folder)
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(model, checkpoint, EngineConfig(kv_cache_tokens=16 * 30, prefill_chunk_tokens=chunk, max_running=2,
                                                    max_batch_tokens=64))
    poison(engine)
    pixels = np.random.default_rng(2).integers(0, 256, (32 * 9, 32 * 9, 3), np.uint8)
    head = [*range(10, 20), tiny.VISION_START, *[tiny.IMAGE] * 81, tiny.VISION_END]
    name = content_hash(32 * 9, 32 * 9, pixels.tobytes())
    for number, tail in enumerate(([7, 8, 9], [7, 8, 9], [11, 12])):
        tokens = [*head, *tail]
        engine.submit(request(f"r{number}", tokens, 8, grids=[Grid(t=1, h=18, w=18)], images=[name], ignore_eos=True), [pixels])
        assert run(engine).tokens[f"r{number}"] == oracle.greedy(folder, tokens, [pixels], 8), number
        assert engine.counters().cached_tokens == 80 * number, "a hit ends inside the picture, which ends at 92"


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)).save(file, "JPEG", quality=80)
    return file.getvalue()


def test_pictures_that_begin_with_the_same_bytes_have_different_names() -> None:
    """MR-11: two JPEGs of equal headers and tables."""
    image = checkpoints.read(checkpoints.DEMO).image
    assert image is not None
    one, other = jpeg(1), jpeg(2)
    assert one[:600] == other[:600]
    names = {images.decode(data, image, max_pixels=1 << 20, field="f").content_hash for data in (one, other, one)}
    assert len(names) == 2


def test_the_same_picture_again_is_the_same_request() -> None:
    """MR-27: with its grid, computed or found."""
    engine, _ = make(state_snapshots=8)
    asked, pixels, values = shown(4, 3)
    right = answer(values, *positions(asked.tokens, [PICTURE]), 6)
    for _ in range(2):
        engine.submit(asked, pixels)
        assert run(engine).tokens["r"] == right
    assert engine.counters().cached_tokens == 28


@pytest.mark.parametrize(("frames", "places"), [(15, 29), (29, 15)])
def test_more_places_than_frames_are_refused_with_both_counts(frames: int, places: int) -> None:
    """MR-13, MR-26: before anything is computed; the next request is answered."""
    engine, _ = make()
    one = Grid(t=1, h=2, w=4)
    pixels = [picture(number, one.h, one.w) for number in range(frames)]
    tokens = [5, *[IMAGE, IMAGE, 6] * places]
    with pytest.raises(InvalidRequestError, match=f"holds {2 * places} image placeholder tokens, its {frames} images need "
                                                  f"{2 * frames}"):
        engine.submit(request("r", tokens, 2, grids=[one] * frames), pixels)
    engine.submit(request("next", text(1, 5), 2), (), Recorder())
    assert len(run(engine).tokens["next"]) == 1
