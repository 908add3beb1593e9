"""Routing over real workers: by what they have cached, to decode alone, and with a prefill pool that dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster, Running
from tests.support.samples import FOLDER
from tests.support.traffic import messages, until_healthy
from tests.support.worker_client import pair

LONG = "Name the animals of the farm. The cow, the hen, the goose and the old grey horse live there. " * 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two routers before the same workers: one that splits every request, one whose decode replicas may compute prompts."""
    cluster = Cluster(tmp_path_factory.mktemp("routing"))
    workers = cluster.start_workers("prefill", "prefill", "decode")
    cluster.start_router(workers, ["router.routing.predict_seconds=0"])
    cluster.start_router(workers, ["router.routing.local_prefill_tokens=100000", "router.empty_prefill_pool=local"])
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) <= {0}
    assert not complaints


def client(router: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60, headers={"x-slipstream-report": "1"})


async def ask(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json={"model": "demo", "temperature": 0, **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def text(body: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in body["choices"]]


async def explained(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = (await http.get(f"/explain/{body['id']}")).json()["events"][0]
    return told


async def test_prompts_follow_what_real_workers_say_that_they_have_cached(cluster: Cluster) -> None:
    """A hybrid model: a hit needs a snapshot, so the guess agrees with what prefill then finds."""
    async with client(cluster.processes["router-0"]) as http:
        await until_healthy(http, 30)
        say = [{"role": "user", "content": LONG}]
        first = await explained(http, await ask(http, messages=say, max_tokens=4))
        assert all(one["cached_tokens"] == 0 for one in first["candidates"])
        async with asyncio.timeout(10):
            while True:  # what the worker says of its cache comes with a report, or a second later
                body = await ask(http, messages=say, max_tokens=4)
                event = await explained(http, body)
                if body["usage"]["prompt_tokens_details"]["cached_tokens"] and event["computed_tokens"] < 64:
                    break
        assert event["prefill"] == first["prefill"]
        guessed = {one["replica"]: one["cached_tokens"] for one in event["candidates"]}
        assert guessed[first["prefill"]] == body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert guessed["decode-0"] >= guessed[first["prefill"]] > 0
        salted = await explained(http, await ask(http, messages=say, max_tokens=4, cache_salt="tenant"))
        assert all(one["cached_tokens"] == 0 for one in salted["candidates"])


async def test_what_decode_computes_alone_is_what_both_compute(cluster: Cluster) -> None:
    """One after the other, and with nothing cached: otherwise more of them would be cheaper on prefill."""
    rows = [json.loads(line) for line in (FOLDER / "samples.jsonl").read_text().splitlines()]
    texts = [row for row in rows if not row["id"].startswith("img_")][::2]
    assert texts
    drawn = {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 12, "logprobs": True}
    answers: list[list[Any]] = []
    for name in ("router-0", "router-1"):
        async with client(cluster.processes[name]) as http:
            await until_healthy(http, 30)
            bodies = [await ask(http, messages=messages(row), cache_salt=name) for row in texts]
            bodies.append(await ask(http, messages=messages(texts[0]), cache_salt=name, **drawn))
            alone = [(await explained(http, body))["local"] != "" for body in bodies]
            assert sum(alone) == 0 if name == "router-0" else sum(alone) > len(alone) // 2
            assert [body["slipstream"]["kv_bytes"] == 0 for body in bodies] == alone
            answers.append([text(body) for body in bodies] + [body["usage"]["completion_tokens"] for body in bodies])
    assert answers[0] == answers[1]
    assert [one[0].strip() for one in answers[0][: len(texts)]] == [row["answer"].strip() for row in texts]


async def test_pictures_are_always_computed_by_prefill(cluster: Cluster) -> None:
    rows = [json.loads(line) for line in (FOLDER / "samples.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["id"] == "img_count-0")
    async with client(cluster.processes["router-1"]) as http:
        await until_healthy(http, 30)
        body = await ask(http, messages=messages(row))
        assert text(body)[0].strip() == row["answer"].strip()
        assert (await explained(http, body))["local"] == ""


async def test_a_client_that_leaves_leaves_nothing_on_decode(cluster: Cluster) -> None:
    async with (client(cluster.processes["router-1"]) as http,
                pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers):
        await until_healthy(http, 30)
        body = {"model": "demo", "stream": True, "max_tokens": 400, "ignore_eos": True, "cache_salt": "leaves",
                "messages": [{"role": "user", "content": LONG}]}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            await anext(response.aiter_lines())
        await workers.until_empty()


async def test_a_prefill_pool_that_dies_under_load_costs_no_request_where_decode_may_compute(cluster: Cluster) -> None:
    """The last test here: both prefill replicas are killed. Requests whose prefill is lost go on, on decode alone."""
    async with client(cluster.processes["router-1"]) as http:
        await until_healthy(http, 30)
        right = text(await ask(http, messages=[{"role": "user", "content": "Count the rows."}], max_tokens=16))
        running = [asyncio.create_task(ask(http, messages=[{"role": "user", "content": "Count the rows."}], max_tokens=16,
                                           cache_salt=str(number))) for number in range(6)]
        for name in ("prefill-0", "prefill-1"):
            cluster.kill(cluster.processes[name])
        assert [text(body) for body in await asyncio.gather(*running)] == [right] * 6
        body = await ask(http, messages=[{"role": "user", "content": "Count the rows."}], max_tokens=16, cache_salt="after")
        assert text(body) == right
        assert (await explained(http, body))["local"] in ("empty_pool", "short")
        assert (await http.get("/health")).status_code == 200
    async with client(cluster.processes["router-0"]) as http:
        async with asyncio.timeout(10):
            while (reply := await http.get("/health")).status_code != 503:  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0.05)
        assert "prefill" in reply.json()["problem"]
