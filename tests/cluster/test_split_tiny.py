"""Split greedy output equals transformers' on tiny random checkpoints of every architecture, for several chunk sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.types import Grid
from tests.support import oracle, tiny
from tests.support.cluster import Cluster
from tests.support.worker_client import Prompt, pair

CHUNKS = (0, 7, 64)
MAX_TOKENS = 20


@pytest.fixture(scope="module", params=["qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5_text", "qwen3_5_vl", "qwen3_next",
                                        "qwen3_5_moe_vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Cluster]]:
    """A checkpoint folder, one decode replica, and one prefill replica for each chunk size (`prefill-0`, ...)."""
    folder = tiny.write(request.param, tmp_path_factory.mktemp(request.param))
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    shared = [f"model.path={folder}", "engine.kv_cache_tokens=8192"]
    cluster.start_each(("decode", shared), *(("prefill", [*shared, f"engine.prefill_chunk_tokens={chunk}"])
                                             for chunk in CHUNKS))
    yield folder, cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


def texts() -> list[Prompt]:
    draw = np.random.default_rng(5)
    return [Prompt(tokens=draw.integers(1, 490, length).tolist(), max_tokens=MAX_TOKENS, ignore_eos=True)
            for length in (1, 15, 16, 17, 64, 150)]


def with_pictures(one_grid: bool) -> list[Prompt]:
    """One picture, two adjacent ones of different aspect, a picture as the last thing of the prompt, and a video between
    pictures: a grid for each group of frames, or `one_grid`."""
    draw = np.random.default_rng(6)

    def picture(height: int, width: int) -> tuple[list[int], object, Grid]:
        pixels = draw.integers(0, 256, (height * 32, width * 32, 3), dtype=np.uint8)
        return [tiny.IMAGE] * (height * width), pixels, Grid(t=1, h=2 * height, w=2 * width)

    def frames(groups: int, height: int, width: int) -> tuple[list[int], object, Grid]:
        pixels = draw.integers(0, 256, (2 * groups, height * 32, width * 32, 3), dtype=np.uint8)
        return [tiny.VIDEO] * (groups * height * width), pixels, Grid(t=groups, h=2 * height, w=2 * width, t_step=4.0)

    def prompt(*parts: object) -> Prompt:
        tokens: list[int] = []
        pixels, grids = [], []
        for part in parts:
            if isinstance(part, tuple):
                tokens += [tiny.VISION_START, *part[0], tiny.VISION_END]
                pixels.append(part[1])
                grids.append(part[2])
            else:
                assert isinstance(part, list)
                tokens += part
        return Prompt(tokens=tokens, pixels=pixels, grids=grids, max_tokens=MAX_TOKENS, ignore_eos=True)

    last = prompt([9, 8], picture(3, 4))
    video = [frames(2, 2, 6)] if one_grid else [frames(1, 2, 6), [40, 41], frames(1, 2, 6)]
    return [prompt([7], picture(2, 2), [8, 9], *video, [10, 11], picture(1, 3), [12]),
            prompt([5, 6, 7], picture(4, 3), [11, 12]), prompt(picture(2, 5), picture(6, 2), [30] * 9),
            Prompt(tokens=last.tokens[:-1], pixels=last.pixels, grids=last.grids, max_tokens=MAX_TOKENS, ignore_eos=True)]


async def test_greedy_equals_transformers(served: tuple[Path, Cluster]) -> None:
    folder, cluster = served
    pictures = with_pictures(one_grid=folder.name.startswith("qwen2")) if "_vl" in folder.name else []
    prompts = texts() + pictures
    right = [await asyncio.to_thread(oracle.greedy, folder, prompt.tokens, prompt.pixels, MAX_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in right}) == len(right), "every prompt has an answer of its own"
    for number, chunk in enumerate(CHUNKS):
        async with pair(cluster.processes[f"prefill-{number}"].address, cluster.processes["decode-0"].address) as both:
            answers = await asyncio.gather(*(both.ask(prompt) for prompt in prompts))
            for prompt, answer, tokens in zip(prompts, answers, right, strict=True):
                assert answer.tokens == tokens, f"{len(prompt.tokens)} tokens, {len(prompt.pixels)} pictures, chunks of {chunk}"
            await both.until_empty()
