"""A replica of several ranks, all in this process, over its real connections: the tokens of one rank alone."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import checkpoint as checkpoints
from slipstream import sharding
from slipstream.checkpoint import DEMO
from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.models import registry
from slipstream.types import Grid, RequestId, SamplingParams
from tests.support import engine_driver, mtp, oracle, tiny
from tests.support.drafting import RIGHT, Watched
from tests.support.engine_driver import assert_empty, poison, request
from tests.support.engine_pair import Pair
from tests.support.replica import CONFIG, replica
from tests.support.samples import Samples

Asks = list[tuple[GenerationRequest, Any]]
"""Each with its pixels."""


def asks() -> Asks:
    """Pictures, texts that begin alike, choices, everything that the drawing rank must be told."""
    checkpoint = checkpoints.read(DEMO)
    samples = {sample.name: sample for sample in Samples(checkpoint).all()}
    found: Asks = []
    for number, name in enumerate(["img_row-0", "facts-0", "img_two-1", "img_row-0", "arith-1"]):
        sample = samples[name]
        stop = tuple(checkpoint.eos_token_ids)
        images = [bytes([len(pixels) % 251]) * 16 for pixels in sample.pixels]
        asked = request(f"{number}-{name}", sample.tokens, 40, grids=sample.grids, stop=stop, images=images)
        found.append((asked, sample.pixels))
    noise = dataclasses.replace(
        request("noise", range(40, 140), 12, ignore_eos=True, choices=(0, 1, 2)),
        sampling=SamplingParams(temperature=1.5, seed=3, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2,
                                logit_bias=((7, 2.0),), top_p=0.97))
    return [*found, (noise, ())]


def serve(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """All at once, one of them given up in the middle; then all again, from the cache."""
    pair = Pair(engine, None)

    def step() -> None:
        result = engine.step()
        engine.check_integrity()
        pair.take(dataclasses.replace(result, events=tuple(one for one in result.events if one.request.name != "left")))

    for turn in ("first", "again"):
        for asked, pixels in asks():
            pair.submit(dataclasses.replace(asked, id=RequestId(name=f"{asked.id.name}-{turn}")), pixels)
        left = request("left", range(60, 120), 50, ignore_eos=True)
        engine.submit(left)
        for _ in range(6):
            step()
        engine.abort(left.id)
        while engine.has_work:
            step()
        assert not pair.open
        assert_empty(engine)
    assert engine.counters().cached_tokens > 100
    return pair.tokens


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], list[int]]:
    torch.set_num_threads(1)
    checkpoint = checkpoints.read(DEMO)
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(model, checkpoint, CONFIG)
    poison(engine)
    return serve(engine)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (4, 3)])
def test_the_tokens_of_one_rank_alone(tp: int, pp: int, alone: dict[tuple[str, int], list[int]]) -> None:
    assert replica(DEMO, tp, pp, serve) == alone


@pytest.mark.parametrize(("tp", "pp"), [(1, 3), (2, 2)])
def test_the_same_tokens_with_drafts(tp: int, pp: int, alone: dict[tuple[str, int], list[int]], tmp_path: Path) -> None:
    """Several steps are in flight, requests are given up in the middle, and of the drafts any number is right."""
    folder = mtp.add(shutil.copytree(DEMO, tmp_path / "demo"))
    prompts = {asked.id.name: asked.tokens for asked, _ in asks()}
    texts = [[*prompts[name.rpartition("-")[0]], *tokens] for (name, _), tokens in alone.items()]
    accepted = []

    def counted(engine: Engine) -> dict[tuple[str, int], list[int]]:
        found = serve(engine)
        accepted.append(engine.counters().spec_accepted_tokens)
        return found

    watch = functools.partial(Watched, right=RIGHT["mixed"], texts=texts)
    assert replica(folder, tp, pp, counted, drafts=3, watch=watch) == alone
    assert accepted[0] > 50


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 3)])
def test_deepstack_reaches_the_stages_that_add_it(tp: int, pp: int, vl: tuple[Path, Asks, list[list[int]]]) -> None:
    """Features for layers 0 to 2, of which stage 0 has at most two; pictures and a text in one step, cut inside a picture."""
    folder, asks, right = vl

    def serve(engine: Engine) -> list[list[int]]:
        for turn in ("first", "again"):
            pair = Pair(engine, None)
            for asked, pixels in asks:
                pair.submit(dataclasses.replace(asked, id=RequestId(name=f"{turn}-{asked.id.name}")), pixels)
            while engine.has_work:
                pair.take(engine.step())
                engine.check_integrity()
            assert list(pair.tokens.values()) == right, turn
        assert_empty(engine)
        assert engine.counters().cached_tokens > 100
        return right

    assert pp == 1 or sharding.plan(checkpoints.read(folder), tp=tp, pp=pp).stages[0] < 3
    assert replica(folder, tp, pp, serve) == right


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_tied_vl"])
def vl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Asks, list[list[int]]]:
    """A folder, requests, and what transformers answers."""
    folder = tiny.write(request.param, tmp_path_factory.mktemp("vl"))
    draw = np.random.default_rng(4)
    asks: Asks = []
    for name, before, sizes in (("text", 70, []), ("long", 80, [(6, 5)]), ("two", 3, [(3, 2), (2, 6)]), ("last", 20, [(4, 4)])):
        tokens = draw.integers(0, 490, before).tolist()
        for h, w in sizes:
            tokens += [tiny.VISION_START, *[tiny.IMAGE] * (h * w), tiny.VISION_END]
        pixels = [draw.integers(0, 256, (32 * h, 32 * w, 3), dtype=np.uint8) for h, w in sizes]
        asked = engine_driver.request(name, tokens, 12, grids=[Grid(t=1, h=2 * h, w=2 * w) for h, w in sizes], ignore_eos=True,
                        images=[bytes([len(name), h, w]) * 4 for h, w in sizes])
        asks.append((asked, pixels))
    return folder, asks, [oracle.greedy(folder, asked.tokens, pixels, 12) for asked, pixels in asks]
