"""Replicas of several ranks, real processes without Ray: the tokens of one process, whatever the geometries of both sides."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO
from tests.support import tiny
from tests.support.cluster import Cluster
from tests.support.samples import Samples
from tests.support.traffic import Ask, send, until_healthy
from tests.support.worker_client import Prompt, pair


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("source", "destination"), [
    pytest.param((2, 1), (1, 2), id="tp2-pp2"), pytest.param((1, 1), (4, 1), id="1-tp4", marks=pytest.mark.long),
    pytest.param((1, 3), (2, 1), id="pp3-tp2", marks=pytest.mark.long),
    pytest.param((2, 1), (2, 1), id="tp2-tp2", marks=pytest.mark.long)])
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
            info = both.prefill.info
            assert (info.tensor_parallel, info.pipeline_parallel) == source
            sent: dict[str, list[int]] = {}
            for sample in samples.all()[::9] * 2:
                prompt = Prompt(tokens=sample.tokens, pixels=sample.pixels, grids=sample.grids,
                                stop_ids=checkpoint.eos_token_ids, max_tokens=300)
                answer = await both.ask(prompt)
                assert samples.decode(answer.tokens).strip() == sample.answer.strip(), sample.name
                if len(sample.tokens) > 16:  # a whole block
                    sent.setdefault(sample.name, []).append(answer.decode.kv_bytes)
            assert all(again < first for first, again in sent.values()), "what decode has cached is not sent again, to any rank"
            await both.until_empty()
        assert set(cluster.close().values()) == {0}
        assert not [line for running in cluster.processes.values() for line in running.complaints()]
    finally:
        cluster.close()


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_production_geometry_in_small(tmp_path: Path) -> None:
    """TP8 x PP2 in front of TP2: health, chat, streaming and completion as from one process."""
    folder = tiny.write_wide(tmp_path / "wide")
    shared = [f"model.path={folder}", "engine.kv_cache_tokens=4096", "engine.max_running=4", "engine.state_snapshots=4"]
    cluster = Cluster(tmp_path)
    chat = {"messages": [{"role": "user", "content": "Count 3 to 5."}], "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    completion = {"prompt": list(range(40, 140)), "max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 4}
    kinds = [Ask(name="chat", path="/v1/chat/completions", body=chat),
             Ask(name="completion", path="/v1/completions", body=completion)]
    try:
        single = cluster.start_each(("prefill", shared), ("decode", shared))
        prefill, decode = cluster.start_gang("prefill", 8, 2, shared), cluster.start_gang("decode", 2, 1, shared)
        routers = [cluster.start_router(workers, ["router.worker_silence_seconds=30", f"model.path={folder}"])
                   for workers in (single, [prefill[0], decode[0]])]
        found = []
        for router in routers:
            async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=120) as client:
                await until_healthy(client, 60)
                found.append([await send(client, ask, stream=stream, model="wide")
                              for ask in kinds for stream in (False, True)])
        assert not [reply.error for replies in found for reply in replies if reply.error]
        assert found[1] == found[0]
    finally:
        cluster.close()
