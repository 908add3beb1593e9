"""Prefix reuse, several choices, resume and preemption change no token: random conversations on the toy model, whose answers
show every row and every state that is not what it should be."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.block_hash import content_hash
from slipstream.engine.engine import GenerationRequest
from slipstream.errors import ContextLengthError, InvalidRequestError
from slipstream.positions import mrope_positions
from slipstream.types import Grid, SamplingParams
from tests.support.engine_driver import assert_empty, poison, request
from tests.support.engine_pair import Pair
from tests.support.toy_engine import make, picture, text
from tests.support.toy_model import IMAGE, MERGE, answer, image_values

GRIDS = (Grid(t=1, h=4, w=2), Grid(t=1, h=4, w=6), Grid(t=1, h=8, w=8))


@dataclass
class Talk:
    """A prompt that grows turn by turn."""

    hybrid: bool = True
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)

    def say(self, words: Sequence[int]) -> None:
        self.tokens += words
        self.values += words

    def show(self, seed: int) -> None:
        grid = GRIDS[seed % len(GRIDS)]
        pixels = picture(seed, grid.h, grid.w)
        self.tokens += [IMAGE] * (grid.h * grid.w // MERGE**2)
        self.values += image_values(pixels)
        self.grids.append(grid)
        self.pixels.append(pixels)

    def copy(self) -> Talk:
        return Talk(self.hybrid, list(self.tokens), list(self.values), list(self.grids), list(self.pixels))

    def expected(self, count: int) -> list[int]:
        positions, delta = mrope_positions(self.tokens, self.grids, image_token_id=IMAGE, video_token_id=None, merge_size=MERGE)
        return answer(self.values, positions.tolist(), delta, count, hybrid=self.hybrid)

    def request(self, name: str, count: int, **more: object) -> GenerationRequest:
        hashes = [content_hash(pixels.shape[0], pixels.shape[1], pixels.tobytes()) for pixels in self.pixels]
        return request(name, self.tokens, count, grids=self.grids, images=hashes, **more)  # type: ignore[arg-type]


def converse(of: Pair, rng: random.Random, first: Talk,
             before: Callable[[GenerationRequest], object] = lambda asked: None) -> None:
    """Twelve turns of conversations that branch off each other, some at once. Every answer is right, and nothing is left.
    `before`: is called with each request first."""
    first.say(text(rng.randrange(10**6), rng.randrange(1, 30)))
    talks = [first]
    expected: dict[str, list[int]] = {}
    for number in range(12):
        talk = rng.choice(talks).copy()
        for _ in range(rng.randrange(1, 3)):
            if rng.random() < 0.4 and len(talk.tokens) < 120:
                talk.show(rng.randrange(6))
            talk.say(text(rng.randrange(4), rng.randrange(1, 14)))
        count = rng.randrange(1, 24)
        if len(talk.tokens) + count > 200:
            continue
        expected[f"r{number}"] = talk.expected(count)
        asked = talk.request(f"r{number}", count)
        before(asked)
        of.submit(asked, talk.pixels)
        follow = talk.copy()
        follow.say(talk.expected(count))
        talks.append(follow)
        of.run(rng.choice([0, 3, 10_000]))
    of.run()
    assert {name: of.tokens[name, 0] for name in expected} == expected
    for engine in of.engines():
        assert_empty(engine)


def sampled(asked: GenerationRequest, seed: int) -> GenerationRequest:
    """At random, but never a placeholder: the toy takes none in its output."""
    sampling = SamplingParams(temperature=1.0, seed=seed, logit_bias=((IMAGE, -1000.0),), presence_penalty=0.1)
    return dataclasses.replace(asked, sampling=sampling)


def pair(hybrid: bool, blocks: int, *, split: bool = True, **config: Any) -> Pair:
    engines = []
    for snapshots in (6, 0) if split else (6,):
        engine, _ = make(hybrid=hybrid, kv_cache_tokens=4 * blocks, state_snapshots=snapshots, max_context=300, **config)
        poison(engine)
        engines.append(engine)
    return Pair(engines[0], engines[1] if split else None)


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), hybrid=st.booleans(), split=st.booleans(), blocks=st.sampled_from([60, 90, 400]),
       chunk=st.sampled_from([0, 3, 8]), growth=st.sampled_from([1, 8, 256]))
def test_random_conversations_get_the_same_tokens_with_eviction_and_preemption(
        seed: int, hybrid: bool, split: bool, blocks: int, chunk: int, growth: int) -> None:
    rng = random.Random(seed)
    of = pair(hybrid, blocks, split=split, prefill_chunk_tokens=chunk, growth_tokens=growth, max_batch_tokens=24)
    converse(of, rng, Talk(hybrid))


def test_reuse_is_real_on_both_sides_and_pictures_are_not_encoded_again() -> None:
    of = pair(True, 400)
    talk = Talk()
    talk.say(text(1, 9))
    talk.show(2)
    talk.say(text(2, 6))
    of.submit(talk.request("first", 12), talk.pixels)
    of.run()
    assert of.decode is not None
    before = of.prefill.counters(), of.decode.counters()
    length = len(talk.tokens)
    talk.say(talk.expected(12))
    talk.say(text(3, 9))
    of.submit(talk.request("second", 5), talk.pixels)
    of.run()
    assert of.tokens["second", 0] == talk.expected(5)
    prefill, decode = of.prefill.counters(), of.decode.counters()
    assert prefill.cached_tokens - before[0].cached_tokens == (length - 1) // 4 * 4
    assert decode.reused_tokens - before[1].reused_tokens == (length + 11) // 4 * 4, "the answer's rows are there too"
    model = of.prefill._runner._model
    assert model.encoded == 1  # type: ignore[attr-defined]


def test_salts_and_other_pictures_share_nothing() -> None:
    of = pair(True, 400)
    for number, (salt, seed) in enumerate((("", 2), ("tenant", 2), ("", 5), ("", 2))):
        talk = Talk()
        talk.show(seed)
        talk.say(text(1, 9))
        of.submit(talk.request(f"r{number}", 4, salt=salt), talk.pixels)
        of.run()
        assert of.tokens[f"r{number}", 0] == talk.expected(4)
        assert (of.prefill.counters().cached_tokens > 0) == (number == 3)


def test_images_without_hashes_are_computed_anew() -> None:
    of = pair(False, 400)
    talk = Talk(hybrid=False)
    talk.show(2)
    talk.say(text(1, 9))
    for name in "ab":
        of.submit(request(name, talk.tokens, 4, grids=talk.grids), talk.pixels)
        of.run()
        assert of.tokens[name, 0] == talk.expected(4)
    assert of.prefill.counters().cached_tokens == 0


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("length", [5, 8, 13])
def test_several_choices_equal_requests_of_one_choice_each(hybrid: bool, length: int) -> None:
    """Sampled by seed, choice and index: whether the choices share a prompt or not, alone or beside others."""
    alone = pair(hybrid, 400, prefix_cache=False)
    together = pair(hybrid, 60, growth_tokens=2)
    unsplit = pair(hybrid, 60, split=False, growth_tokens=2)
    for seed in range(3):
        prompt = text(seed, length)
        for choice in range(3):
            alone.submit(sampled(request(f"s{seed}", prompt, 20, choices=(choice,)), seed), [])
            alone.run()
        asked = sampled(request(f"s{seed}", prompt, 20, choices=(0, 1, 2)), seed)
        together.submit(asked, [])
        unsplit.submit(asked, [])
    together.run()
    unsplit.run()
    assert together.tokens == alone.tokens == unsplit.tokens
    assert len({tuple(tokens) for tokens in alone.tokens.values()}) == 9
    for engine in (*together.engines(), *unsplit.engines()):
        assert_empty(engine)


@pytest.mark.parametrize("at", range(1, 12, 2))
def test_a_forced_resume_goes_on_as_if_nothing_had_happened(at: int) -> None:
    """Seeds and indexes go on, for each of three choices; pictures stay where they are."""
    talk = Talk()
    talk.say(text(4, 6))
    talk.show(1)
    talk.say(text(5, 5))
    straight, cut = pair(True, 400), pair(True, 400)
    asked = sampled(talk.request("r", 14, choices=(0, 1, 2)), 3)
    straight.submit(asked, talk.pixels)
    straight.run()
    cut.submit(asked, talk.pixels)
    for _ in range(at):
        cut.step()
    for engine in cut.engines():
        engine.abort(asked.id)
    cut.waiting.clear()
    cut.resume(asked.id)
    cut.run()
    assert cut.tokens == straight.tokens
    for engine in cut.engines():
        assert_empty(engine)


def test_under_memory_pressure_the_youngest_is_preempted_and_all_end_right() -> None:
    of = pair(True, 40, growth_tokens=1, max_running=6)
    talks = [Talk() for _ in range(6)]
    for number, talk in enumerate(talks):
        talk.say(text(number, 20))
        of.submit(talk.request(f"r{number}", 60), [])
    of.run()
    assert of.resumes > 0
    assert of.decode is not None
    assert of.decode.counters().preemptions == of.resumes
    for number, talk in enumerate(talks):
        assert of.tokens[f"r{number}", 0] == talk.expected(60)
    assert_empty(of.decode)


def test_what_could_never_run_is_refused() -> None:
    engine, _ = make(kv_cache_tokens=80, max_running=4, max_context=300)
    with pytest.raises(InvalidRequestError, match="5 choices; this replica runs 4"):
        engine.submit(request("a", [1], 2, choices=(0, 1, 2, 3, 4)))
    with pytest.raises(InvalidRequestError, match="ascending"):
        engine.submit(request("a", [1], 2, choices=(1, 0)))
    with pytest.raises(InvalidRequestError, match="one choice at a time"):
        engine.submit(request("a", [1], 9, choices=(0, 1), output=[3]))
    with pytest.raises(InvalidRequestError, match="nothing to resume"):
        engine.submit(request("a", [1], 2, output=[3, 4]))
    with pytest.raises(InvalidRequestError, match="1 image grids and 2 content hashes"):
        engine.submit(request("a", [IMAGE] * 2, 2, grids=GRIDS[:1], images=[b"x", b"y"]))
    with pytest.raises(ContextLengthError, match="n, or raise"):
        engine.submit(request("a", [1] * 30, 20, choices=(0, 1, 2)))
    assert_empty(engine)
