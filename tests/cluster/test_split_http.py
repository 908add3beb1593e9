"""The sample prompts through the router's HTTP API: all right, with 8 in flight, and nothing is left on the workers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO
from slipstream.text.tokenizer import Tokenizer
from tests.support import oracle
from tests.support.cluster import Cluster
from tests.support.samples import FOLDER
from tests.support.traffic import messages, until_healthy
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


async def ready(client: httpx.AsyncClient) -> str:
    """Wait until the router has both roles; the model's name."""
    await until_healthy(client, 30)
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


async def test_a_text_is_scored_as_by_transformers(cluster: Cluster) -> None:
    """Computed in one place and decoded in another, the second time too, when it is cached (API-10)."""
    tokens = Tokenizer(DEMO).encode("What is 97 - 34? What is 12 + 51? Count the rows of the table, then answer: 63. " * 3)
    exact = torch.log_softmax(oracle.logits(DEMO, tokens), -1)[:-1]
    own = exact.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    async with httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as client:
        body = {"model": await ready(client), "prompt": tokens, "max_tokens": 2, "temperature": 0}
        for _ in range(2):
            answer = (await client.post("/v1/completions", json={**body, "echo": True, "logprobs": 1,
                                                                 "prompt_logprobs": 3})).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            choice = answer["choices"][0]
            told = choice["logprobs"]["token_logprobs"]
            assert len(told) == len(tokens) + 2
            assert (told[0], told[1 : len(tokens)]) == (None, pytest.approx(own, abs=1e-4))
            best = [[one["logprob"] for one in entry.values() if one["rank"] <= 3] for entry in choice["prompt_logprobs"][1:]]
            assert [sorted(one, reverse=True) for one in best] == [
                pytest.approx(row, abs=1e-4) for row in exact.topk(3).values.tolist()]
        again = (await client.post("/v1/completions", json=body)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["choices"][0]["text"] == choice["text"].removeprefix(Tokenizer(DEMO).words(tokens))


async def test_a_video_over_http(cluster: Cluster) -> None:
    """Computed in one place and decoded in another, as transformers would."""
    frames = [np.random.default_rng(seed).integers(0, 256, (64, 96, 3), np.uint8) for seed in range(4)]
    urls = []
    for frame in frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    content = [{"type": "video", "video": urls, "fps": 1}, {"type": "text", "text": "Describe the image."}]
    tokenizer = Tokenizer(DEMO)
    group = f"<|vision_start|>{'<|video_pad|>' * 6}<|vision_end|>"
    tokens = tokenizer.encode(f"<|im_start|>user\n<0.5 seconds>{group}<2.5 seconds>{group}Describe the image.<|im_end|>\n"
                              "<|im_start|>assistant\n")
    stops = sorted(checkpoints.read(DEMO).eos_token_ids)
    right = await asyncio.to_thread(oracle.greedy, DEMO, tokens, [np.stack(frames[:2]), np.stack(frames[2:])], 24, stops)
    async with httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as client:
        reply = await client.post("/v1/chat/completions", headers={"x-slipstream-report": "1"}, json={
            "model": await ready(client), "temperature": 0, "max_tokens": 24,
            "messages": [{"role": "user", "content": content}]})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["usage"]["prompt_tokens"] == len(tokens)
    assert body["slipstream"]["kv_bytes"] > 0
    assert body["choices"][0]["message"]["content"] == tokenizer.decode([token for token in right if token not in stops])


def openai_client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.processes['router-0'].address}/v1", api_key="none", max_retries=0)


async def test_the_official_client(cluster: Cluster) -> None:
    """Chat, streaming chat with usage, completions, images, logprobs, n, stop and seed, as its users write them."""
    async with httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}") as http:
        model = await ready(http)
    rows = {row["id"]: row for row in map(json.loads, (FOLDER / "samples.jsonl").read_text().splitlines())}
    await asyncio.to_thread(_official, openai_client(cluster), model, rows["img_lookup-0"])
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers:
        await workers.until_empty()


def _official(client: openai.OpenAI, model: str, row: dict[str, Any]) -> None:
    shown: Any = messages(row)
    whole = client.chat.completions.create(model=model, messages=shown, temperature=0, logprobs=True, top_logprobs=2,
                                           extra_body={"cache_salt": "official"})
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == (row["answer"], "stop")
    assert choice.logprobs is not None
    told = choice.logprobs.content or []
    assert "".join(one.token for one in told) == row["answer"]
    assert all(one.top_logprobs[0].token == one.token and one.logprob <= 0 for one in told), "greedy takes the most probable"
    assert whole.usage is not None
    chunks = list(client.chat.completions.create(
        model=model, messages=shown, temperature=0, stream=True, stop=row["answer"][-2:],
        stream_options={"include_usage": True}, extra_body={"cache_salt": "official"}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == row["answer"][:-2]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens == usage.total_tokens - usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16, "the same prompt, again"

    items: Any = [{"role": "user", "content": [
        {"type": "input_text", "text": part["text"]} if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]} for part in shown[0]["content"]]}]
    response = client.responses.create(model=model, input=items, temperature=0)
    assert response.output_text == row["answer"]
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (usage.prompt_tokens, whole.usage.completion_tokens)
    events: list[Any] = list(client.responses.create(model=model, input=items, temperature=0, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == row["answer"]
    assert events[-1].response.output_text == row["answer"]
    counted = httpx.post(f"{str(client.base_url).removesuffix('/v1/')}/tokenize", json={"model": model, "messages": shown})
    assert counted.json()["count"] == usage.prompt_tokens

    noise: Any = {"model": model, "prompt": list(range(40, 60)), "temperature": 2.0, "max_tokens": 20}

    def sampled(seed: int, n: int) -> list[str]:
        reply = client.completions.create(**noise, seed=seed, n=n)
        assert [one.index for one in reply.choices] == list(range(n))
        assert reply.usage is not None
        return [one.text for one in reply.choices]

    three = sampled(7, 3)
    assert len(set(three)) == 3
    assert sampled(7, 1) == three[:1], "a choice depends on the seed and its number, not on the others"
    assert sampled(7, 3) == three
    assert sampled(8, 3) != three
    streamed = ["", "", ""]
    for chunk in client.completions.create(**noise, seed=7, n=3, stream=True):
        for one in chunk.choices:
            streamed[one.index] += one.text
    assert streamed == three


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


@pytest.mark.long
async def test_a_stopped_worker_is_noticed_and_its_request_goes_on(tmp_path: Path) -> None:
    """SIGSTOP leaves every connection open; only its silence tells. The request goes on once a decode replica is there."""
    cluster = Cluster(tmp_path)
    try:
        workers = cluster.start_workers("prefill", "decode")
        router = cluster.start_router(workers, ["router.worker_silence_seconds=2"])
        decode = cluster.processes["decode-0"].pid
        async with httpx.AsyncClient(base_url=f"http://{router.address}", timeout=60) as client:
            body = {"model": await ready(client), "prompt": "What is in row 2?", "max_tokens": 400, "ignore_eos": True}
            right = (await client.post("/v1/completions", json=body)).json()
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                lines = stream.aiter_lines()
                first = await anext(lines)
                os.kill(decode, signal.SIGSTOP)
                async with asyncio.timeout(20):
                    while (await client.get("/health")).status_code != 503:  # noqa: ASYNC110 (another process)
                        await asyncio.sleep(0.1)
                os.kill(decode, signal.SIGCONT)
                events = [line[6:] for line in [first, *[line async for line in lines]] if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            assert text == right["choices"][0]["text"]
            async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as held:
                await held.until_empty(10)
    finally:
        cluster.close()
