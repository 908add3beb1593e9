"""Sampling on the demo checkpoint: the same tokens for the same seed in every batch, and stop tokens held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.errors import InvalidRequestError
from slipstream.models import registry
from slipstream.models.registry import LanguageModel
from slipstream.types import SamplingParams, StopParams
from tests.support.engine_driver import request, run
from tests.support.samples import Samples

CHECKPOINT = checkpoints.read(DEMO)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.set_num_threads(1)
    return registry.load(CHECKPOINT, dtype=torch.float32, device=torch.device("cpu"))


def make(model: LanguageModel) -> Engine:
    return Engine(model, CHECKPOINT, EngineConfig(kv_cache_tokens=16384, max_running=32, max_batch_tokens=512))


@cache
def texts() -> list[Sequence[int]]:
    return [one.tokens for one in Samples(CHECKPOINT).all() if not one.pixels]


def asked(name: str, number: int) -> GenerationRequest:
    prompts = texts()
    sampling = SamplingParams(temperature=0.9, seed=number, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2,
                              presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((5, 1.0),))
    base = request(name, prompts[number % len(prompts)], 10, ignore_eos=True)
    return replace(base, sampling=sampling)


def test_the_same_seed_gives_the_same_tokens_in_batches_of_1_8_and_32_and_across_a_resume(model: LanguageModel) -> None:
    found = []
    for size in (1, 8, 32):
        tokens: dict[str, list[int]] = {}
        for start in range(0, 32, size):
            engine = make(model)
            for number in range(start, start + size):
                engine.submit(asked(f"r{number}", number))
            tokens |= run(engine).tokens
        found.append(tokens)
    assert len(found[0]) == 32
    assert found[0] == found[1] == found[2]
    assert resumed(model, found[2]) == found[2]


def resumed(model: LanguageModel, whole: dict[str, list[int]]) -> dict[str, list[int]]:
    """Each request is cut off after some of its tokens and goes on beside 31 others, on an engine that has never seen it."""
    engine, tokens = make(model), {}
    for name, told in whole.items():
        number = int(name[1:])
        tokens[name] = told[: 1 + number % 9]
        engine.submit(replace(asked(name, number), output=tuple(tokens[name])))
    while engine.has_work:
        for event in engine.step().events:
            assert event.index == len(tokens[event.request.name])
            tokens[event.request.name] = [*tokens[event.request.name], event.token]
    return tokens


def test_no_stop_token_before_min_tokens(model: LanguageModel) -> None:
    bias = SamplingParams(logit_bias=((7, 90.0), (8, 80.0)))
    engine = make(model)
    base = request("held", asked("x", 0).tokens, 8)
    engine.submit(replace(base, sampling=bias,
                          stop=StopParams(max_tokens=8, min_tokens=3, stop_token_ids=frozenset({7, 1 << 30}))))
    assert run(engine).tokens["held"] == [8, 8, 8, 7]


@pytest.mark.parametrize("sampling", [
    SamplingParams(min_p=float("nan")), SamplingParams(repetition_penalty=0.0),
    SamplingParams(repetition_penalty=1e-38), SamplingParams(top_k=-1), SamplingParams(logprobs=21),
    SamplingParams(logit_bias=((CHECKPOINT.vocab_size, 1.0),)),
    SamplingParams(logit_bias=((1, 1.0), (1, 2.0))), SamplingParams(presence_penalty=float("inf"))], ids=str)
def test_refused(model: LanguageModel, sampling: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError):
        make(model).submit(replace(request("bad", [1, 2]), sampling=sampling))
