"""Every sampling parameter and combinations of them against a slow reading of their formulas."""

from __future__ import annotations

import math
from functools import cache
from itertools import count, product

import pytest
import torch

from slipstream.engine.sampler import Draw, logprobs, sample, uniform
from slipstream.types import SamplingParams

LOGITS = [1.0, 3.0, -2.0, 2.5, 0.0, -30.0, 2.5, 1.5]
PROMPT, OUTPUTS = [1, 4, 2, 1], [3, 3, 6, 1]
SEED, DRAWS = 5, 400


def adjusted(params: SamplingParams, barred: frozenset[int]) -> list[float]:
    """Token by token."""
    bias, found = dict(params.logit_bias), []
    for token, logit in enumerate(LOGITS):
        logit = -math.inf if token in barred else logit + bias.get(token, 0.0)
        if token in PROMPT or token in OUTPUTS:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * OUTPUTS.count(token)
        found.append(logit - (params.presence_penalty if token in OUTPUTS else 0.0))
    return found


def distribution(params: SamplingParams, barred: frozenset[int] = frozenset()) -> list[float]:
    """Exact probabilities."""
    logits = adjusted(params, barred)
    weights = [math.exp((logit - max(logits)) / params.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] >= params.min_p]
    order = order[: params.top_k or len(order)]
    total, mass, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(weights))]


def draw(params: SamplingParams, index: int, barred: frozenset[int] = frozenset()) -> Draw:
    return Draw(params=params, choice=0, index=index, barred=barred, prompt=torch.tensor(PROMPT), outputs=OUTPUTS)


@cache
def spread() -> list[int]:
    """For each of DRAWS equal intervals of [0, 1) the first index whose point lies in it."""
    found: dict[int, int] = {}
    for index in count():
        found.setdefault(int(uniform(SEED, 0, index) * DRAWS), index)
        if len(found) == DRAWS:
            return list(found.values())
    raise AssertionError


CASES = [
    {"top_k": 1}, {"top_k": 3}, {"top_k": 100}, {"min_p": 0.1}, {"min_p": 1.0}, {"presence_penalty": 1.0},
    {"presence_penalty": -1.0}, {"frequency_penalty": 0.75}, {"repetition_penalty": 1.5}, {"repetition_penalty": 0.5},
    {"logit_bias": ((5, 31.0), (1, -100.0))},
    *({"top_k": k, "top_p": p, "min_p": m, "temperature": t, **penalties}
      for k, p, m, t in product((0, 4), (0.7, 1.0), (0.0, 0.2), (0.6, 1.7))
      for penalties in ({}, {"presence_penalty": 0.3, "frequency_penalty": 0.4, "repetition_penalty": 1.3,
                             "logit_bias": ((0, 1.25), (4, 2.0))})),
]


@pytest.mark.parametrize("barred", [frozenset(), frozenset({1, 10**6})], ids=["free", "barred"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_exact_distribution(case: dict[str, object], barred: frozenset[int]) -> None:
    """A token's share of [0, 1) is one piece. With one point in each of 400 equal intervals only the two at the ends of the
    piece are in doubt: no right sampler fails, and a share that is wrong by 1 % or more always shows.
    """
    params = SamplingParams(**{"temperature": 1.0, "seed": SEED, **case})  # type: ignore[arg-type]
    exact = distribution(params, barred)
    logits = torch.tensor(LOGITS).repeat(DRAWS, 1)
    tokens = sample(logits, [draw(params, index, barred) for index in spread()])
    found = [tokens.count(token) for token in range(len(LOGITS))]
    assert sum(found) == DRAWS
    for times, share in zip(found, exact, strict=True):
        assert abs(times - share * DRAWS) < 2 if share * DRAWS >= 1e-3 else times == 0
    assert torch.equal(logits[0], torch.tensor(LOGITS)), "the model's logits are left alone"


def test_greedy_takes_the_best_of_the_adjusted_logits() -> None:
    for params in (SamplingParams(presence_penalty=1.9), SamplingParams(frequency_penalty=-2.0),
                   SamplingParams(repetition_penalty=1.9), SamplingParams(logit_bias=((5, 100.0),))):
        logits = adjusted(params, frozenset())
        assert sample(torch.tensor([LOGITS]), [draw(params, 0)]) == [logits.index(max(logits))]
    assert sample(torch.tensor([LOGITS]), [draw(SamplingParams(), 0, frozenset(range(len(LOGITS))))]) == [None]


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias=((5, 100.0),), logprobs=3)
    logits = torch.tensor([LOGITS, LOGITS])
    exact = torch.log_softmax(logits[0].double(), dim=0)
    told, silent = logprobs(logits, [draw(params, 0), draw(SamplingParams(), 0)], [5, 1])
    assert silent is None
    assert told is not None
    assert told.logprob == pytest.approx(float(exact[5]), abs=1e-5)
    assert told.top[0][0] == 1
    assert [value for _, value in told.top] == pytest.approx(exact.topk(3).values.tolist(), abs=1e-5)
