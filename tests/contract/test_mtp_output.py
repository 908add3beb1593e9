"""Drafts change how fast output comes and nothing else: tokens, ends, logprobs and counts are as without, whatever is asked."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.engine import sampler
from slipstream.engine.drafting import Drawn, accepted
from slipstream.engine.engine import GenerationRequest
from slipstream.layers.batch import AttentionCache
from slipstream.types import FinishReason, SamplingParams, StopParams, TokenEvent
from tests.support import mtp, oracle, tiny
from tests.support.drafting import RIGHT, engine
from tests.support.engine_driver import assert_empty, request
from tests.support.engine_pair import Pair

Events = dict[tuple[str, int], list[TokenEvent]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return mtp.add_easy(tiny.write("qwen3_5_text", tmp_path_factory.mktemp("easy"), seed=1))


def asks() -> list[GenerationRequest]:
    """Greedy and drawn; choices; everything that looks at the output so far; a resumed one; several ends."""
    draw = random.Random(2)

    def text(length: int) -> list[int]:
        return [draw.randrange(490) for _ in range(length)]

    def sampled(name: str, tokens: list[int], stop: StopParams, choices: tuple[int, ...] = (0,), **how: Any
                ) -> GenerationRequest:
        asked = request(name, tokens, choices=choices)
        return dataclasses.replace(asked, sampling=SamplingParams(**{"temperature": 0.8, "seed": 5} | how), stop=stop)

    short, long = StopParams(max_tokens=9), StopParams(max_tokens=33)
    ends = StopParams(max_tokens=40, stop_token_ids=frozenset(range(0, 512, 9)), min_tokens=6)
    return [
        request("greedy", text(19), 40, ignore_eos=True), request("stops", text(16), 40, stop=range(0, 512, 11)),
        request("one", text(5), 1), request("two", text(31), 2), request("short", [7], 12), request("three", [9, 9], 3),
        dataclasses.replace(request("resumed", text(20), 30), output=tuple(text(8))),
        sampled("drawn", text(40), long, top_p=0.9, logprobs=3), sampled("choices", text(23), long, (0, 1, 2), top_k=40),
        sampled("hot", text(12), short, temperature=3.0), sampled("ends", text(33), ends, logprobs=0),
        sampled("penalties", text(50), long, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4, logprobs=1),
        sampled("biased", text(9), ends, (0, 3), logit_bias=((7, 4.0), (18, 4.0)), min_p=0.01)]


def serve(folder: Path, drafts: int, right: str = "own", texts: list[list[int]] | None = None, **config: Any
          ) -> tuple[Events, Any, int]:
    """All events by request and choice, the counters, and how often something was resumed. One request is given up midway."""
    made, model = engine(folder, drafts, layer=drafts > 0, **config)
    model.right, model.texts = RIGHT[right], texts or []
    pair, events = Pair(made, None), dict[tuple[str, int], list[TokenEvent]]()
    for asked in asks():
        pair.tokens[asked.id.name, 0] = list(asked.output)
        pair.submit(asked, ())
    made.submit(request("left", range(60, 99), 60, ignore_eos=True))
    for step in range(2000):
        result = made.step()
        made.check_integrity()
        result = dataclasses.replace(result, events=tuple(one for one in result.events if one.request.name != "left"))
        for event in result.events:
            events.setdefault((event.request.name, event.choice), []).append(event)
        pair.take(dataclasses.replace(result, failures=tuple(one for one in result.failures if one[0].name != "left")))
        if step == 9:
            made.abort(request("left", [1]).id)
        if not pair.open and not made.has_work:
            break
    assert not pair.open
    assert_empty(made)
    return events, made.counters(), pair.resumes


def same(found: Events, expected: Events) -> None:
    """Token for token, end for end, and logprobs to rounding."""
    assert found.keys() == expected.keys()
    for key, events in expected.items():
        told = [(one.index, one.token, one.finish) for one in found[key]]
        assert told == [(one.index, one.token, one.finish) for one in events], key
        for ours, theirs in zip(found[key], events, strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None and theirs.logprobs is not None:
                assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
                assert [token for token, _ in ours.logprobs.top] == [token for token, _ in theirs.logprobs.top]


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Events, Any, int]:
    return serve(folder, 0, kv_cache_tokens=16 * 80)


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_output_is_the_same(folder: Path, plain: tuple[Events, Any, int], drafts: int, right: str) -> None:
    expected, slow, _ = plain
    prompts = {asked.id.name: asked.tokens for asked in asks()}
    texts = [[*prompts[name], *(one.token for one in events)] for (name, _), events in expected.items()]
    found, counters, _ = serve(folder, drafts, right, texts, kv_cache_tokens=16 * 80)
    same(found, expected)
    assert counters.output_tokens >= slow.output_tokens - 60, "but for the one that was given up, what is told is counted"
    if right in ("own", "all"):
        assert counters.spec_accepted_tokens > (0.4 * counters.spec_draft_tokens if right == "all" else 20)
        assert counters.steps < slow.steps


@pytest.mark.parametrize("config", [{"kv_cache_tokens": 16 * 13, "growth_tokens": 4}, {"max_batch_tokens": 9, "block_size": 4},
                                    {"block_size": 2, "prefix_cache": False, "prefill_chunk_tokens": 5, "max_running": 3}])
def test_little_memory_and_small_steps(folder: Path, plain: tuple[Events, Any, int], config: dict[str, Any]) -> None:
    """Preemption and resume in the middle of accepted tokens; steps without room for drafts; drafts over several blocks."""
    found, counters, resumes = serve(folder, 3, **config)
    same(found, plain[0])
    assert counters.spec_accepted_tokens > 0
    assert (resumes > 0) == ("growth_tokens" in config)


def test_kv_in_fp8(folder: Path) -> None:
    """The draft layer's rows too; a cache in FP8 rounds alike with drafts and without."""
    made, _ = engine(folder, 3, kv_dtype="fp8_e4m3")
    assert {cache.kv.dtype for cache in made.caches if isinstance(cache, AttentionCache)} == {torch.float8_e4m3fn}
    found, plain = (serve(folder, drafts, kv_dtype="fp8_e4m3", kv_cache_tokens=16 * 80) for drafts in (3, 0))
    same(found[0], plain[0])
    assert found[1].spec_accepted_tokens > 0


def chance(found: Sequence[int], expected: Sequence[float]) -> float:
    """That counts differ this much or more from what is expected (chi-square)."""
    distance = sum((ours - right) ** 2 / right for ours, right in zip(found, expected, strict=True))
    return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2.0), torch.tensor(distance / 2.0)))


def test_a_draft_counts_as_often_as_the_model_would_draw_it() -> None:
    """Exact probabilities of two tokens in a row, by chi-square over seeds, which sees two mistakes that are easy to make."""
    logits_RV = torch.tensor([[1.2, 0.3, -0.5, 0.9, -1.0], [0.1, 1.0, 0.4, -0.7, 0.2]])
    params = SamplingParams(temperature=0.7)
    first, second = (torch.softmax(row.double() / params.temperature, -1).numpy() for row in logits_RV)
    draft, count = 0, 4000
    assert draft == int(first.argmax())
    pairs, accepting, resampled = Counter[tuple[int, int]](), Counter[int](), Counter[int]()
    for seed in range(count):
        how = dataclasses.replace(params, seed=seed)
        drawn = [Drawn(token=token) for token in sampler.sample(
            logits_RV, [sampler.Draw(params=how, choice=0, index=index) for index in (4, 5)])]
        right = accepted([draft], drawn)
        token = drawn[0].token
        assert token is not None
        assert right == (token == draft)
        pairs[token, drawn[1].token or 0 if right else -1] += 1
        accepting[draft if sampler.uniform(seed, 9, 9) < 0.9 else token] += 1
        again = sampler.sample(logits_RV[:1], [sampler.Draw(params=how, choice=1, index=4)])[0]
        resampled[token if right else again or 0] += 1
    expected = {(token, -1): count * first[token] for token in range(1, 5)}
    expected |= {(draft, token): count * first[draft] * second[token] for token in range(5)}
    assert pairs.keys() <= expected.keys()
    keys = list(expected)
    assert chance([pairs[key] for key in keys], [expected[key] for key in keys]) > 0.01
    for wrong in (accepting, resampled):
        assert chance([wrong[token] for token in range(5)], [*(count * first)]) < 1e-6


def test_the_distribution_through_the_engine(folder: Path) -> None:
    """The first three tokens of 480 choices, the third drawn at its draft's place: eight outcomes, by transformers' softmax."""
    made, _ = engine(folder, 2, max_running=16, max_batch_tokens=128)
    prompt, outcomes = list(range(30, 51)), dict[tuple[int, ...], float]()

    def spread(tokens: tuple[int, ...], likely: float) -> None:
        if len(tokens) == 3:
            outcomes[tokens] = likely
            return
        values, ids = oracle.logits(folder, [*prompt, *tokens])[-1].double().topk(2)
        for token, share in zip(ids.tolist(), (values / 2.0).softmax(-1).tolist(), strict=True):
            spread((*tokens, token), likely * share)

    spread((), 1.0)
    found = Counter[tuple[int, ...]]()
    for batch in range(30):
        asked = request(f"batch-{batch}", prompt, 4, choices=tuple(range(16)), ignore_eos=True)
        made.submit(dataclasses.replace(asked, sampling=SamplingParams(temperature=2.0, top_k=2, seed=batch)))
        tokens: dict[int, tuple[int, ...]] = {}
        while made.has_work:
            for event in made.step().events:
                tokens[event.choice] = (*tokens.get(event.choice, ()), event.token)
        found.update(first[:3] for first in tokens.values())
    assert made.counters().spec_draft_tokens == 480
    assert 48 < made.counters().spec_accepted_tokens < 432, "both happen often"
    keys = list(outcomes)
    assert min(outcomes.values()) * 480 > 4
    assert chance([found[key] for key in keys], [480 * outcomes[key] for key in keys]) > 0.01


class Form:
    """A Matcher of its own: what may come depends on all that came, and `length` tokens are the end."""

    def __init__(self, length: int, taken: Sequence[int] = ()) -> None:
        self._length, self._taken = length, list(taken)

    def copy(self) -> Form:
        return Form(self._length, self._taken)

    def accept(self, token: int) -> None:
        assert self._may(token)
        self._taken.append(token)

    def ends_with(self, token: int) -> bool:
        return len(self._taken) + 1 >= self._length

    def allowed_along(self, drafts: Sequence[int]) -> list[bytes]:
        found, after = [self._mask()], self.copy()
        for token in drafts:
            if not after._may(token) or after.ends_with(token):
                break
            after.accept(token)
            found.append(after._mask())
        return found

    def _may(self, token: int) -> bool:
        return token % 7 == sum(self._taken) % 7

    def _mask(self) -> bytes:
        return np.packbits([self._may(token) for token in range(512)], bitorder="little").tobytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_form_is_kept_and_is_the_same(folder: Path, temperature: float) -> None:
    def write(drafts: int, texts: list[list[int]]) -> tuple[list[int], Any]:
        made, model = engine(folder, drafts, layer=drafts > 0)
        model.right, model.texts = RIGHT["mixed"], texts
        asked = dataclasses.replace(request("form", range(30), 60, ignore_eos=True),
                                    sampling=SamplingParams(temperature=temperature, seed=3))
        made.submit(asked, matcher=Form(41))
        events: list[TokenEvent] = []
        while made.has_work:
            result = made.step()
            assert not result.failures
            events += result.events
        assert events[-1].finish is FinishReason.STOP
        assert_empty(made)
        return [event.token for event in events], made.counters()

    expected, slow = write(0, [])
    assert len(expected) == 41
    found, fast = write(3, [[*range(30), *expected]])
    assert found == expected
    assert fast.spec_accepted_tokens > 10
    assert fast.spec_accepted_tokens < fast.spec_draft_tokens
    assert fast.steps < slow.steps
