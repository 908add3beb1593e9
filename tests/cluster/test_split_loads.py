"""A conversation over HTTP on several replicas: what decode has of it goes to prefill, which computes only what is new."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx

from cache_transfer.layout import CacheLayout
from slipstream import checkpoint
from slipstream.checkpoint import DEMO
from tests.support.cluster import Cluster
from tests.support.samples import FOLDER
from tests.support.traffic import until_healthy

_LAYOUT = CacheLayout(model_name="demo", weights_revision="", layers=checkpoint.read(DEMO).layers, block_size=16,
                      kv_dtype="float32", conv_dtype="float32")
KV_BYTES, STATE_BYTES = _LAYOUT.bytes_necessary(1)
LONG = "Name the animals of the farm. The cow, the hen, the goose and the old grey horse live there. " * 3


async def test_three_turns_are_loaded_and_get_the_answers_of_one_process(tmp_path: Path) -> None:
    """The demo model is a hybrid that sees: a picture first. One router loads, the other never does."""
    cluster = Cluster(tmp_path)
    workers = cluster.start_workers("prefill", "decode")
    cluster.start_router(workers, ["router.routing.load_tokens=16", "router.routing.predict_seconds=0"])
    cluster.start_router(workers, ["router.routing.load_tokens=0"])
    picture = base64.b64encode(next(FOLDER.glob("*.png")).read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}, {"type": "text", "text": LONG}]

    async with (httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as loads,
                httpx.AsyncClient(base_url=f"http://{cluster.processes['router-1'].address}", timeout=60) as plain):
        async def ask(http: httpx.AsyncClient, said: list[dict[str, Any]], salt: str) -> dict[str, Any]:
            reply = await http.post("/v1/chat/completions", json={
                "model": "demo", "messages": said, "temperature": 0, "max_tokens": 40, "min_tokens": 40, "cache_salt": salt})
            assert reply.status_code == 200, reply.text
            return {**reply.json(), "events": (await http.get(f"/explain/{reply.json()['id']}")).json()["events"]}

        async def talk(http: httpx.AsyncClient, salt: str) -> list[dict[str, Any]]:
            said: list[dict[str, Any]] = [{"role": "user", "content": parts}]
            answers = []
            for turn in range(3):
                answers.append(await ask(http, said, salt))
                said += [{"role": "assistant", "content": answers[-1]["choices"][0]["message"]["content"]},
                         {"role": "user", "content": f"And number {turn}?"}]
            return answers

        await until_healthy(loads, 30)
        await until_healthy(plain, 30)
        found, right = await talk(loads, "a"), await talk(plain, "b")
        told = (await loads.get("/metrics")).text
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints
    texts = [[one["choices"][0]["message"]["content"] for one in talks] for talks in (found, right)]
    assert texts[0] == texts[1]
    for one, other in zip(found[1:], right[1:], strict=True):
        (load,) = [event for event in one["events"] if event["event"] == "load"]
        assert (load["outcome"], load["load_from"]) == ("loaded", "decode-0")
        cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (one, other)]
        assert cached[0] - cached[1] == load["tokens"] == 32, "whole blocks of the answer"
        assert load["kv_bytes"] == 32 * KV_BYTES
        assert load["state_bytes"] == STATE_BYTES
    assert 'slipstream_router_cache_loads_total{outcome="loaded"} 2' in told
    assert "slipstream_router_loaded_tokens_total 64" in told
