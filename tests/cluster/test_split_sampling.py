"""Sampling over a split deployment: logprobs of every token, the first too, and what the end token can be made to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO
from slipstream.types import FinishReason, SamplingParams
from tests.support import oracle
from tests.support.cluster import Cluster
from tests.support.samples import Sample, Samples
from tests.support.worker_client import Prompt, pair

CHECKPOINT = checkpoints.read(DEMO)
EOS = CHECKPOINT.eos_token_ids


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("sampling"))
    cluster.start_workers("prefill", "decode")
    yield cluster
    assert set(cluster.close().values()) == {0}


@pytest.fixture(scope="module")
def sample() -> Sample:
    return next(one for one in Samples(CHECKPOINT).all() if not one.pixels)


async def test_logprobs_are_those_of_the_oracle(cluster: Cluster, sample: Sample) -> None:
    sampling = SamplingParams(temperature=1.5, seed=4, repetition_penalty=1.25, presence_penalty=0.5, logprobs=5)
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers:
        prompt = Prompt(tokens=sample.tokens, max_tokens=12, ignore_eos=True, sampling=sampling)
        answer = await workers.ask(prompt)
        told = {report.index[one.row]: one for worker in (workers.prefill, workers.decode) for report in worker.reports
                for one in report.logprobs}
    assert sorted(told) == list(range(12))
    logits = oracle.logits(DEMO, [*sample.tokens, *answer.tokens])
    for index, token in enumerate(answer.tokens):
        exact = torch.log_softmax(logits[len(sample.tokens) - 1 + index].double(), dim=0)
        assert told[index].logprob == pytest.approx(float(exact[token]), abs=1e-4)
        assert list(told[index].top_logprob) == pytest.approx(exact.topk(5).values.tolist(), abs=1e-4)


async def test_the_end_token_forced_first_and_forbidden(cluster: Cluster, sample: Sample) -> None:
    first = SamplingParams(logit_bias=tuple((token, 100.0) for token in sorted(EOS)))
    never = SamplingParams(logit_bias=tuple((token, -100.0) for token in sorted(EOS)))
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers:
        ends = await workers.ask(Prompt(tokens=sample.tokens, stop_ids=EOS, sampling=first))
        assert (len(ends.tokens), ends.reason) == (1, FinishReason.STOP)
        goes_on = await workers.ask(Prompt(tokens=sample.tokens, stop_ids=EOS, max_tokens=9, ignore_eos=True, sampling=first))
        assert (len(goes_on.tokens), goes_on.reason) == (9, FinishReason.LENGTH)
        assert set(goes_on.tokens) <= EOS
        without = await workers.ask(Prompt(tokens=sample.tokens, stop_ids=EOS, max_tokens=40, sampling=never))
        assert (len(without.tokens), without.reason) == (40, FinishReason.LENGTH)
        await workers.until_empty()
