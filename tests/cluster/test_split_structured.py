"""Structured output through a split deployment, by the official client: the first token from prefill, the others from decode.

Decode has two stages, so that what is allowed travels to the rank that draws.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from router.schemas import Schemas
from slipstream import checkpoint
from slipstream.checkpoint import DEMO
from slipstream.errors import InvalidRequestError
from slipstream.text import grammar
from tests.support.cluster import Cluster
from tests.support.traffic import until_healthy
from tests.support.worker_client import pair

SCHEMA = {"type": "object", "required": ["colour", "count"], "additionalProperties": False, "properties": {
    "colour": {"enum": ["red", "blue", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}}}
BLOW_UP = {"allOf": [{"type": "string", "pattern": "(a|b|ab|ba|aab)*c{%d}.*" % count} for count in range(20)]}  # noqa: UP031
"""Compiling it would take minutes."""
QUESTION = [{"role": "user", "content": "What colour is the square?"}]


def form(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("structured"))
    workers = [*cluster.start_workers("prefill"), cluster.start_gang("decode", 1, 2)[0]]
    cluster.start_router(workers, ["router.schema_seconds=1"])
    cluster.start_router(workers[1:], ["router.empty_prefill_pool=local"])
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


async def healthy(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        await until_healthy(client, 30)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    url = f"http://{cluster.processes['router-0'].address}"
    asyncio.run(healthy(url))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        yield one


def ask(client: openai.OpenAI, response_format: Any, **more: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=QUESTION, response_format=response_format,  # type: ignore[arg-type]
                                          **{"max_tokens": 200, **more})


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_answers_are_of_the_schema(client: openai.OpenAI, temperature: float) -> None:
    """At temperature 2 a tiny model writes anything; n choices begin with the same prefill."""
    reply = ask(client, form(SCHEMA), n=4, temperature=temperature, seed=7)
    for choice in reply.choices:
        value = json.loads(choice.message.content)
        assert set(value) == {"colour", "count"}
        assert value["colour"] in {"red", "blue", "green"}
        assert value["count"] in range(10)
        assert choice.finish_reason == "stop"
    if temperature:
        assert len({choice.message.content for choice in reply.choices}) > 1


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, form(SCHEMA), temperature=1.0, seed=3)
    pieces = [chunk.choices[0] for chunk in ask(client, form(SCHEMA), temperature=1.0, seed=3, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].finish_reason == "stop"


def test_decode_alone_keeps_the_form(client: openai.OpenAI, cluster: Cluster) -> None:
    """It computes the prompt too where no prefill replica is, and draws the first token under the same mask."""
    url = f"http://{cluster.processes['router-1'].address}"
    asyncio.run(healthy(url))
    asked: dict[str, Any] = {"n": 4, "temperature": 2.0, "seed": 7}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as other:
        alone, split = ask(other, form(SCHEMA), **asked), ask(client, form(SCHEMA), **asked)
    assert [one.message.content for one in alone.choices] == [one.message.content for one in split.choices]
    assert "slipstream_router_local_prefills_total{" in httpx.get(f"{url}/metrics").text


def test_any_object_and_a_first_token_that_ends_the_answer(client: openai.OpenAI) -> None:
    reply = ask(client, {"type": "json_object"}, temperature=1.5, seed=1, max_tokens=60)
    assert reply.choices[0].message.content.startswith("{")
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    reply = ask(client, form({"enum": [5]}))
    assert (reply.choices[0].message.content, reply.usage.completion_tokens) == ("5", 1)


@pytest.mark.parametrize(("response_format", "field"), [
    ({"type": "xml"}, "response_format.type"), ("json", "response_format"), ({}, "response_format.type"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": "{"}}, "response_format.json_schema.schema"),
    (form({"type": "obj"}), "response_format"), (form({"type": "string", "pattern": "("}), "response_format"),
    (form({"enum": ["x" * 70_000]}), "response_format"),
])
def test_what_cannot_be_is_the_users_mistake(client: openai.OpenAI, response_format: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format)
    assert caught.value.param == field
    assert len(caught.value.message) < 2000


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens"])
def test_what_a_form_excludes(client: openai.OpenAI, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        ask(client, form(SCHEMA), extra_body={field: 1 if field == "min_tokens" else True})


def test_a_schema_that_takes_minutes_is_refused_and_nobody_waits(client: openai.OpenAI, cluster: Cluster) -> None:
    url, answers = f"http://{cluster.processes['router-0'].address}", 0
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(pytest.raises, openai.BadRequestError, ask, client, form(BLOW_UP))
        while not refused.done():
            answers += httpx.get(f"{url}/health").status_code == 200
        assert "too complex" in refused.result().value.message
    assert answers > 1
    assert json.loads(ask(client, form(SCHEMA)).choices[0].message.content)


async def test_nothing_is_left(cluster: Cluster) -> None:
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as workers:
        await workers.until_empty()


async def test_a_verdict_is_kept() -> None:
    schemas = Schemas(checkpoint.read(DEMO), max_bytes=1 << 16, seconds=0.5)
    try:
        await schemas.check(grammar.json_schema(SCHEMA))
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="too complex"):
                await schemas.check(grammar.json_schema(BLOW_UP))
            assert not schemas.running, "it was ended, and nothing was asked again"
        await schemas.check(grammar.json_schema(SCHEMA))
        assert not schemas.running
        await schemas.check(grammar.json_object())
        assert schemas.running
    finally:
        await schemas.close()
