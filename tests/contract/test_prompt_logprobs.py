"""Logprobs of prompts against transformers: whole and in chunks, alone and in ranks, beside others, never from the cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO
from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.errors import InternalError, InvalidRequestError
from slipstream.models import qwen, registry
from slipstream.types import PromptLogprobs
from tests.support import mtp, oracle, tiny
from tests.support.engine_driver import Recorder, assert_empty, copy_state, poison, request, run
from tests.support.replica import CONFIG, replica
from tests.support.samples import Samples
from tests.support.toy_engine import make

TOLERANCE = 1e-4
TOKENS = tuple(np.random.default_rng(5).integers(0, 490, 150).tolist())
Found = dict[str, PromptLogprobs]


def asked(name: str, tokens: Sequence[int] = TOKENS, top: int | None = 3, **more: Any) -> GenerationRequest:
    return dataclasses.replace(request(name, tokens, 3, ignore_eos=True, **more), prompt_logprobs=top)


def told(engine: Engine, *requests: GenerationRequest) -> Found:
    """What is told of each prompt, which happens once, with its first token."""
    found: Found = {}
    for one in requests:
        engine.submit(one)
    while engine.has_work:
        for event in engine.step().events:
            name = event.request.name
            wanted = next(one for one in requests if one.id == event.request)
            first = (event.choice, event.index) == (wanted.choices[0], len(wanted.output))
            assert (event.prompt is not None) is (first and wanted.prompt_logprobs is not None)
            if event.prompt is not None:
                found[name] = event.prompt
    assert_empty(engine)
    return found


def check(found: PromptLogprobs, tokens: Sequence[int], logits: torch.Tensor, top: int) -> None:
    right = torch.log_softmax(logits, -1)[:-1]
    own = right.gather(-1, torch.tensor(tokens[1:])[:, None])
    assert len(found) == len(tokens) - 1
    assert float((own[:, 0] - torch.tensor(found.logprobs)).abs().max()) < TOLERANCE
    ranks = (right > own + TOLERANCE).sum(-1) + 1, (right > own - TOLERANCE).sum(-1)  # the second counts the token itself
    assert all(low <= rank <= high for low, rank, high in zip(ranks[0], found.ranks, ranks[1], strict=True))
    best = right.topk(top).values
    for number in range(len(found)):
        row = found.row(number)
        assert row.logprob == found.logprobs[number]
        assert torch.allclose(torch.tensor([logprob for _, logprob in row.top]), best[number], atol=TOLERANCE)
        assert all(abs(float(right[number, token]) - logprob) < TOLERANCE for token, logprob in row.top)


@functools.lru_cache
def engine_model(folder: Path) -> Any:
    torch.set_num_threads(1)
    return registry.load(checkpoints.read(folder), dtype=torch.float32, device=torch.device("cpu"))


def engine_of(folder: Path, **config: Any) -> Engine:
    engine = Engine(engine_model(folder), checkpoints.read(folder), dataclasses.replace(CONFIG, **config))
    poison(engine)
    return engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny.write(name, tmp_path_factory.mktemp(name)) for name in ("qwen3", "qwen3_tied_vl", "qwen3_5_text")}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied_vl", "qwen3_5_text"])
def test_the_numbers_of_transformers_at_any_chunking(folders: dict[str, Path], name: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    logits = oracle.logits(folders[name], TOKENS)
    found = []
    for chunk, rows in ((0, 256), (16, 256), (48, 7), (5, 1)):
        monkeypatch.setattr(qwen, "SCORED_ROWS", rows)
        found.append(told(engine_of(folders[name], prefill_chunk_tokens=chunk), asked("a"))["a"])
        check(found[-1], TOKENS, logits, 3)
    for other in found[1:]:
        assert np.allclose(other.logprobs, found[0].logprobs, atol=1e-5)


def test_no_more_logits_are_there_at_once_than_said(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = engine_model(folders["qwen3"]), list[int]()
    real = model._logits

    def counted(x: torch.Tensor) -> Any:
        sizes.append(len(x))
        return real(x)

    monkeypatch.setattr(qwen, "SCORED_ROWS", 32)
    monkeypatch.setattr(model, "_logits", counted)
    told(engine_of(folders["qwen3"]), asked("a"))
    assert sizes[:4] == [32, 32, 32, 0], "the first step's 96 rows, and none that is drawn from"
    assert max(sizes) == 32


def test_pictures_count_as_the_tokens_of_their_places() -> None:
    sample = next(one for one in Samples(checkpoints.read(DEMO)).all() if one.name == "img_two-1")
    engine = engine_of(DEMO, prefill_chunk_tokens=32)
    images = [bytes([n]) * 16 for n in range(len(sample.pixels))]
    engine.submit(asked("a", sample.tokens, 2, grids=sample.grids, images=images), sample.pixels)
    prompts = [event.prompt for _ in range(40) for event in engine.step().events if event.prompt is not None]
    check(prompts[0], sample.tokens, oracle.logits(DEMO, sample.tokens, sample.pixels), 2)


def test_requests_beside_each_other_get_what_they_asked_for(folders: dict[str, Path]) -> None:
    prompts = {"five": TOKENS[:40], "none": TOKENS[40:80], "zero": TOKENS[80:97], "one": (7,), "three": TOKENS[97:130]}
    tops = {"five": 5, "none": None, "zero": 0, "one": 2, "three": 1}
    found = told(engine_of(folders["qwen3"], prefill_chunk_tokens=24), *(
        asked(name, tokens, tops[name], choices=(0, 1, 2) if name == "three" else (0,)) for name, tokens in prompts.items()))
    assert found.keys() == {"five", "zero", "one", "three"}
    assert found.pop("one") == PromptLogprobs()
    for name, one in found.items():
        check(one, prompts[name], oracle.logits(folders["qwen3"], prompts[name]), tops[name] or 0)
        assert len(one.top_tokens) == len(one) * (tops[name] or 0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text"])
def test_a_cached_prompt_is_computed_again_and_found_by_others(folders: dict[str, Path], name: str) -> None:
    engine = engine_of(folders[name])
    first = told(engine, asked("a"))["a"]
    again = told(engine, asked("b"))["b"]
    assert engine.counters().cached_tokens == 0
    assert np.allclose(first.logprobs, again.logprobs, atol=1e-5)
    told(engine, asked("c", top=None))
    assert engine.counters().cached_tokens == len(TOKENS) // CONFIG.block_size * CONFIG.block_size


def test_a_prompt_that_is_handed_over_tells_on_prefill_alone(folders: dict[str, Path]) -> None:
    prefill, decode = engine_of(folders["qwen3"]), engine_of(folders["qwen3"])
    given, recorder = asked("a"), Recorder()
    prefill.submit(given, publisher=recorder)
    events = [event for _ in range(5) for event in prefill.step().events]
    assert events[0].prompt is not None
    check(events[0].prompt, TOKENS, oracle.logits(folders["qwen3"], TOKENS), 3)
    landing = decode.reserve(dataclasses.replace(given, prompt_logprobs=None))
    assert landing is not None
    copy_state(prefill, *recorder.place, decode, landing, len(TOKENS))
    decode.commit(given.id, first_tokens=[events[0].token], mrope=prefill.mrope(given.id))
    assert all(event.prompt is None for _ in range(4) for event in decode.step().events)


def test_a_resumed_prompt_tells_of_the_prompt_and_not_of_its_output(folders: dict[str, Path]) -> None:
    found = told(engine_of(folders["qwen3"]), asked("a", output=(5, 6)))["a"]
    check(found, TOKENS, oracle.logits(folders["qwen3"], TOKENS), 3)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_tell_the_same(folders: dict[str, Path], tp: int, pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabulary and layers are cut; several steps are in flight."""
    monkeypatch.setattr(qwen, "SCORED_ROWS", 20)
    others = (asked("short", TOKENS[:9], 1), asked("none", TOKENS[3:60], None), asked("long", TOKENS * 2, 4))
    found = replica(folders["qwen3_5_text"], tp, pp, lambda engine: told(engine, *others))
    check(found["short"], TOKENS[:9], oracle.logits(folders["qwen3_5_text"], TOKENS[:9]), 1)
    check(found["long"], TOKENS * 2, oracle.logits(folders["qwen3_5_text"], TOKENS * 2), 4)


def test_a_model_that_drafts_tells_the_same(tmp_path: Path) -> None:
    folder = mtp.add(tiny.write("qwen3_5_text", tmp_path))
    found = replica(folder, 2, 2, lambda engine: told(engine, asked("a")), drafts=2)
    check(found["a"], TOKENS, oracle.logits(folder, TOKENS), 3)


def test_logits_that_are_no_numbers_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = make()
    real = model.forward

    def broken(*given: Any, on_scored: Callable[[torch.Tensor], None], **more: Any) -> Any:
        return real(*given, on_scored=lambda logits: on_scored(logits.index_fill(0, torch.tensor([0]), torch.nan)), **more)

    monkeypatch.setattr(model, "forward", broken)
    engine.submit(asked("broken", range(20, 40)))
    engine.submit(asked("sound", range(40, 60), None))
    collector = run(engine)
    assert isinstance(collector.failures["broken"], InternalError)
    assert len(collector.tokens["sound"]) == 3
    assert_empty(engine)


@pytest.mark.parametrize("top", [-1, 21])
def test_how_many_are_wanted_is_bounded(top: int) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        make()[0].submit(asked("a", range(20, 40), top))
