"""The next turn of a conversation, on a model without recurrent states: decode has the last one and computes what is new."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import families
from slipstream.checkpoint import DEMO
from tests.support.cluster import Cluster
from tests.support.tiny import SERVED
from tests.support.traffic import until_healthy


async def test_the_next_turn_is_computed_where_the_last_one_decoded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    families.write("Qwen3ForCausalLM", folder, vocab_size=1920)
    for name in SERVED:
        shutil.copy(DEMO / name, folder / name)
    cluster, chance = Cluster(tmp_path), random.Random(3)
    model = f"model.path={folder}"
    workers = cluster.start_workers("prefill", "decode", overrides=[model])
    cluster.start_router(workers, [model, "router.routing.local_prefill_tokens=64", "router.routing.predict_seconds=0"])
    first = [chance.randrange(1000) for _ in range(300)]
    second = first + [chance.randrange(1000) for _ in range(20)]

    async with httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60,
                                 headers={"x-slipstream-report": "1"}) as http:
        async def ask(prompt: list[int], **fields: Any) -> tuple[dict[str, Any], str]:
            reply = await http.post("/v1/completions", json={"model": "model", "prompt": prompt, "temperature": 0,
                                                             "max_tokens": 8, "ignore_eos": True, **fields})
            assert reply.status_code == 200, reply.text
            told = (await http.get(f"/explain/{reply.json()['id']}")).json()["events"]
            return reply.json(), str(told[0]["local"])

        await until_healthy(http, 30)
        body, local = await ask(first)
        assert local == ""
        assert body["slipstream"]["kv_bytes"] > 0
        right, local = await ask(second, cache_salt="elsewhere")
        assert local == "", "nothing of it is cached for this tenant"
        async with asyncio.timeout(10):
            while local != "cached":  # what decode says of its cache comes with a report, or a second later
                body, local = await ask(second)
        assert body["choices"] == right["choices"]
        assert body["slipstream"]["kv_bytes"] == 0
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 288
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


@pytest.mark.long
async def test_decode_alone_takes_no_more_than_it_has_memory_for(tmp_path: Path) -> None:
    """Without any prefill replica, three times as many prompts as fit: who does not fit is told so, comes again, and gets the
    answer that it would have got alone."""
    cluster = Cluster(tmp_path)
    decode = cluster.start_workers("decode", overrides=["engine.kv_cache_tokens=1024", "engine.max_running=4"])
    cluster.start_router(decode, ["router.empty_prefill_pool=local"])
    async with httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as http:
        async def ask(number: int, salt: str) -> str:
            content = f"What is 9{number} - 34? " * 12
            reply = await http.post("/v1/chat/completions", json={
                "model": "demo", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "cache_salt": salt,
                "messages": [{"role": "user", "content": content}]})
            assert reply.status_code == 200, reply.text
            return str(reply.json()["choices"][0]["message"]["content"])

        await until_healthy(http, 30)
        alone = [await ask(number, "alone") for number in range(10)]
        assert await asyncio.gather(*(ask(number, "together") for number in range(10))) == alone
        lines = (await http.get("/metrics")).text.splitlines()
        told = dict(line.split() for line in lines if line.startswith("slipstream_router_") and "le=" not in line)
        assert float(told["slipstream_router_decode_retries_total"]) > 0
        assert float(told['slipstream_router_local_prefills_total{reason="empty_pool"}']) == 20
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints
