"""The demo model is as good split as in transformers, task by task, and where it is wrong it is equally wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO
from tests.support import mtp, oracle
from tests.support.cluster import Cluster
from tests.support.samples import Sample, Samples
from tests.support.worker_client import Prompt, pair

MAX_TOKENS = 300
CHECKPOINT = checkpoints.read(DEMO)
STOPS = CHECKPOINT.eos_token_ids
SAMPLES = Samples(CHECKPOINT)



MODES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "one token a step": (lambda _: DEMO, []), "drafts": (mtp.demo, ["speculative.tokens=2"])}
"""How tokens are drawn: a checkpoint that answers as DEMO does, made in an empty folder, and what its workers are told."""

HARD = {"count": [(f"Count {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + ".")
                  for first, last in ((3, 50), (88, 140), (7, 19))],
        "arith": [(f"What is {a} + {b}?", str(a + b)) for a, b in ((17, 5), (480, 733), (9871, 4563), (5274, 8119))],
        "repeat": [(f"Repeat: {text}", text) for text in ("tree 🌳🌳🌳🌳", "lamp")]}
"""Questions beyond what the model learned, beside some that it did, by task."""


def asked() -> list[Sample]:
    """The samples, and HARD."""
    hard = [replace(SAMPLES.text(question), name=f"{task}-hard-{number}", answer=answer)
            for task, pairs in HARD.items() for number, (question, answer) in enumerate(pairs)]
    return SAMPLES.all() + hard


@pytest.fixture(scope="module")
def right() -> dict[str, list[int]]:
    """What transformers answers, in float32."""
    return {sample.name: oracle.greedy(DEMO, sample.tokens, sample.pixels, MAX_TOKENS, sorted(STOPS)) for sample in asked()}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    make, told = MODES[mode]
    folder = make(tmp_path_factory.mktemp("checkpoint"))
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    cluster.start_workers("prefill", "decode", overrides=[f"model.path={folder}", "model.dtype=float32", *told])
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


def score(answers: dict[str, list[int]]) -> Counter[str]:
    """Right answers by task."""
    return Counter(sample.name.partition("-")[0] for sample in asked()
                   if SAMPLES.decode(answers[sample.name]).strip() == sample.answer.strip())


@pytest.mark.long
async def test_accuracy_is_transformers_own_task_by_task(cluster: Cluster, mode: str, right: dict[str, list[int]]) -> None:
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as both:
        async def answer(sample: Sample) -> tuple[str, list[int]]:
            prompt = Prompt(tokens=sample.tokens, pixels=sample.pixels, grids=sample.grids, max_tokens=MAX_TOKENS,
                            stop_ids=STOPS)
            return sample.name, (await both.ask(prompt)).tokens

        answers = dict(await asyncio.gather(*map(answer, asked())))
        await both.until_empty()
    async with httpx.AsyncClient() as client:
        told = (await client.get(f"http://{cluster.processes['decode-0'].metrics}/metrics")).text
    drafts = next(float(line.split()[-1]) for line in told.splitlines()
                  if line.startswith("slipstream_worker_spec_draft_tokens_total"))
    assert (drafts > 0) == (mode == "drafts")
    found, expected = score(answers), score(right)
    assert found == expected
    assert answers == right
    assert len(found) == 15, "a right answer in every task"
    assert sum(found.values()) < len(asked()), "some are wrong, in both"
