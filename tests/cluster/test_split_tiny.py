"""Split greedy output equals transformers' on tiny random checkpoints of every architecture, for several chunk sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import oracle, tiny
from tests.support.cluster import Cluster
from tests.support.tiny_prompts import MAX_TOKENS, prompts_for
from tests.support.worker_client import pair

CHUNKS = (0, 7, 64)


@pytest.fixture(scope="module", params=tiny.deployed())
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


async def test_greedy_equals_transformers(served: tuple[Path, Cluster]) -> None:
    folder, cluster = served
    prompts = prompts_for(folder.name)
    right = [await asyncio.to_thread(oracle.greedy, folder, prompt.tokens, prompt.pixels, MAX_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in right}) == len(right), "every prompt has an answer of its own"
    for number, chunk in enumerate(CHUNKS):
        async with pair(cluster.processes[f"prefill-{number}"].address, cluster.processes["decode-0"].address) as both:
            answers = await asyncio.gather(*(both.ask(prompt) for prompt in prompts))
            for prompt, answer, tokens in zip(prompts, answers, right, strict=True):
                assert answer.tokens == tokens, f"{len(prompt.tokens)} tokens, {len(prompt.pixels)} pictures, chunks of {chunk}"
            await both.until_empty()
