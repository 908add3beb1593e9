"""The sample prompts through the router's HTTP API: all right, with 8 in flight, and nothing is left on the workers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.samples import FOLDER
from tests.support.worker_client import pair


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("http"))
    workers = cluster.start_workers("prefill", "decode", overrides=["transfer.lease_seconds=3"])
    cluster.start_router(workers)
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A sample's messages as OpenAI spells them."""
    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] != "image":
            return given
        data = base64.b64encode((FOLDER / given["image"]).read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    return [{**message, "content": [part(given) for given in message["content"]]
             if isinstance(message["content"], list) else message["content"]} for message in row["messages"]]


async def ready(client: httpx.AsyncClient) -> str:
    """Wait until the router has both roles; the model's name."""
    async with asyncio.timeout(30):
        while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 (another process: there is only asking)
            await asyncio.sleep(0.1)
    return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def test_samples_over_http(cluster: Cluster) -> None:
    rows = [json.loads(line) for line in (FOLDER / "samples.jsonl").read_text().splitlines()]
    room = asyncio.Semaphore(8)
    async with (httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as client,
                pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers):
        model = await ready(client)

        async def ask(row: dict[str, Any]) -> tuple[str, str, str]:
            async with room:
                reply = await client.post("/v1/chat/completions", headers={"x-slipstream-report": "1"},
                                          json={"model": model, "messages": messages(row), "temperature": 0})
            assert reply.status_code == 200, reply.text
            body = reply.json()
            assert body["slipstream"]["kv_bytes"] > 0, "it was computed in one place and decoded in another"
            return row["id"], body["choices"][0]["message"]["content"], row["answer"]

        answers = await asyncio.gather(*(ask(row) for row in rows))
        assert len(answers) == 45
        assert not [answer for answer in answers if answer[1].strip() != answer[2].strip()]
        await workers.until_empty()


async def test_a_client_that_leaves_frees_both_sides(cluster: Cluster) -> None:
    async with (httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as client,
                pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers):
        model = await ready(client)
        body = {"model": model, "prompt": "What is in row 2?", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    break
        await workers.until_empty(5)


async def test_a_stopped_worker_is_noticed_and_comes_back(tmp_path: Path) -> None:
    """SIGSTOP leaves every connection open; only its silence tells (the router must not wait for the deadline)."""
    cluster = Cluster(tmp_path)
    try:
        workers = cluster.start_workers("prefill", "decode")
        router = cluster.start_router(workers, ["router.worker_silence_seconds=2"])
        decode = cluster.processes["decode-0"].pid
        async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60) as client:
            model = await ready(client)
            body = {"model": model, "prompt": "What is in row 2?", "max_tokens": 3000, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                os.kill(decode, signal.SIGSTOP)
                rest = [line async for line in lines if line.startswith("data:")]
            assert json.loads(rest[-1].removeprefix("data:"))["error"]["code"] == "unavailable"
            assert (await client.get("/health")).status_code == 503
            os.kill(decode, signal.SIGCONT)
            await ready(client)
            answer = await client.post("/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 2})
            assert answer.status_code == 200
            async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as held:
                await held.until_empty(10)
    finally:
        cluster.close()
