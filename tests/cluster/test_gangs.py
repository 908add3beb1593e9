"""Replicas of several ranks, real processes without Ray: the tokens of one process, whatever the geometries of both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO
from tests.support.cluster import Cluster
from tests.support.samples import Samples
from tests.support.worker_client import Prompt, pair


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("source", "destination"), [((2, 1), (1, 2)), ((1, 1), (4, 1)), ((1, 3), (2, 1)), ((2, 1), (2, 1))],
                         ids=["tp2-pp2", "1-tp4", "pp3-tp2", "tp2-tp2"])
async def test_the_right_answers_in_every_geometry(tmp_path: Path, source: tuple[int, int], destination: tuple[int, int]
                                                   ) -> None:
    checkpoint = checkpoints.read(DEMO)
    samples = Samples(checkpoint)
    cluster = Cluster(tmp_path)
    try:
        prefill, *_ = cluster.start_gang("prefill", *source)
        decode, *_ = cluster.start_gang("decode", *destination)
        async with pair(prefill.address, decode.address) as both:
            assert len(both.prefill.info.cache_store_addresses) == source[0] * source[1]
            for sample in samples.all()[::9] * 2:
                prompt = Prompt(tokens=sample.tokens, pixels=sample.pixels, grids=sample.grids,
                                stop_ids=checkpoint.eos_token_ids, max_tokens=300)
                answer = await both.ask(prompt)
                assert samples.decode(answer.tokens).strip() == sample.answer.strip(), sample.name
            await both.until_empty()
        assert set(cluster.close().values()) == {0}
        assert not [line for running in cluster.processes.values() for line in running.complaints()]
    finally:
        cluster.close()
