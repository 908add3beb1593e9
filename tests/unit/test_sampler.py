"""Sampling follows the exact distribution and is a function of (logits, parameters, seed, choice, index) alone."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from slipstream.engine.sampler import Draw, sample, uniform
from slipstream.types import SamplingParams

DRAWS = 8_000


def frequencies(logits: torch.Tensor, *, temperature: float, top_p: float = 1.0, choice: int = 0) -> torch.Tensor:
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=11)
    tokens = sample(logits.repeat(DRAWS, 1), [Draw(params=params, choice=choice, index=i) for i in range(DRAWS)])
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)).double() / DRAWS


def within_five_sigma(found: torch.Tensor, exact: torch.Tensor) -> bool:
    sigma = (exact * (1 - exact) / DRAWS).sqrt()
    return bool(((found - exact).abs() <= 5 * sigma + 1e-12).all())


LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, -30.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_follows_the_exact_distribution(temperature: float) -> None:
    exact = torch.softmax(LOGITS.double() / temperature, dim=0)
    assert within_five_sigma(frequencies(LOGITS, temperature=temperature), exact)


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.95])
def test_top_p_keeps_the_smallest_nucleus_and_renormalises(top_p: float) -> None:
    probability = torch.softmax(LOGITS.double(), dim=0)
    kept, mass = [], 0.0
    for token in sorted(range(len(LOGITS)), key=lambda i: -float(probability[i])):
        if mass >= top_p:
            break
        kept.append(token)
        mass += float(probability[token])
    exact = torch.zeros_like(probability)
    exact[kept] = probability[kept] / mass
    assert 0 < len(kept) < len(LOGITS)
    assert within_five_sigma(frequencies(LOGITS, temperature=1.0, top_p=top_p), exact)


def test_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [2.0, 1.0, 0.0]])
    assert sample(logits, [Draw(params=SamplingParams(), choice=0, index=0)] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-9, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9)
    logits = torch.tensor([[-1e4, 80.0, 79.0, 1e-3, -torch.inf]])
    assert {sample(logits, [Draw(params=params, choice=0, index=i)])[0] for i in range(50)} == {1}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 1.0])
    found = frequencies(logits, temperature=50.0)
    assert found[0] == found[2] == 0
    assert within_five_sigma(found, torch.tensor([0.0, 0.5, 0.0, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_give_no_token_and_spare_the_other_rows(bad: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0], [3.0, 1.0, 2.0]])
    for temperature in (0.0, 1e-9):
        draw = Draw(params=SamplingParams(temperature=temperature), choice=0, index=0)
        assert sample(logits, [draw] * 3) == [2, None, 0]
    assert sample(torch.full((1, 3), -torch.inf), [Draw(params=SamplingParams(), choice=0, index=0)]) == [None]


def test_a_token_does_not_depend_on_the_batch_around_it() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(17, 301, generator=generator) * 3
    draws = [Draw(params=SamplingParams(temperature=(i % 4) * 0.4, top_p=0.5 + 0.02 * i, seed=i), choice=i % 3, index=i * 7)
             for i in range(17)]
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(17)]
    backwards = sample(logits.flip(0), draws[::-1])
    assert together == alone == backwards[::-1]


def test_each_of_seed_choice_and_index_matters() -> None:
    points = {uniform(seed, choice, index) for seed in range(10) for choice in range(10) for index in range(10)}
    assert len(points) == 1000
    assert all(0 <= point < 1 for point in points)
    assert abs(sum(points) / 1000 - 0.5) < 5 * math.sqrt(1 / 12 / 1000)


def test_the_same_numbers_give_the_same_point_in_another_process() -> None:
    """Python's own hash would not: it is salted per process."""
    code = "from slipstream.engine.sampler import uniform; print(uniform(3, 1, 2), uniform(2**64 - 1, 0, 0))"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
    assert [float(point) for point in out.split()] == [uniform(3, 1, 2), uniform(2**64 - 1, 0, 0)]
