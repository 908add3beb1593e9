"""A real router's HTTP: bodies, paths, limits, request ids, metrics and logs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.types import Role
from tests.support.fake_workers import Plan
from tests.support.scripted_router import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    MESSAGES,
    MODEL,
    REFUSING,
    Front,
    Later,
    front,
    no_worker_hears,
    picture,
    refused,
)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router"), *REFUSING) as one:
        yield one


@pytest.fixture(autouse=True)
def untouched(router: Front) -> Iterator[None]:
    with no_worker_hears(router):
        yield


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b"{'a': 1}",
        b"\xff\xfe{}",
        b"\x80",
        b"[" * 100000,
        b'{"a":' * 50000,
        b'{"model": "demo_model", "messages": }',
        b'{"model": "demo_model", "seed": ' + b"9" * 10000 + b"}",
    ],
)
def test_bad_json(router: Front, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        refused(router.post(path, body))


@pytest.mark.parametrize("name", ["no-such-model", "", None, 5, "x" * 5000, "\ud800"])
def test_unknown_model(router: Front, name: Any) -> None:
    reply = router.post(CHAT, {"model": name, "messages": MESSAGES})
    error = refused(reply, reply.status_code)
    assert error["param"] == "model" or name == "\ud800"
    if name == "no-such-model":
        assert (reply.status_code, error["code"]) == (404, "model_not_found")
    assert reply.status_code in (400, 404)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a\ud800b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]},
        {"messages": MESSAGES, "stop": "\ud800"},
        {"messages": MESSAGES, "field\ud800": 1},
        {"messages": [{"role": "\ud800", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "k\ud800": 1}]},
        {"messages": MESSAGES, "stream_options": {"\ud800": 1}, "stream": True},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,\ud800"}}]}
            ]
        },
    ],
)
def test_half_characters(router: Front, body: Any) -> None:
    """JSON can hold half of a surrogate pair, which no tokenizer and no encoder takes."""
    refused(router.post(CHAT, {"model": MODEL, **body}))


def test_half_characters_in_a_prompt(router: Front) -> None:
    refused(router.post(COMPLETIONS, {"model": MODEL, "prompt": "a\ud800"}))


def test_unknown_paths_and_methods(router: Front) -> None:
    with router.client() as client:
        for path in ("/", "/v1", "/v1/embeddings", "/v1/chat/completions/x", "/../etc", "//v1/models", "/V1/models"):
            refused(client.get(path), 404)
        for reply in (client.get(CHAT), client.delete("/v1/models"), client.post("/health")):
            refused(reply, 405)


def test_large_bodies(router: Front) -> None:
    refused(router.post(CHAT, b"x" * 2_000_001), 413)
    with router.client() as client:
        reply = client.post(CHAT, content=(b"x" * 100_000 for _ in range(21)))  # no content-length
        refused(reply, 413)


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "inf", "1e400", "", "1_0", "9" * 400])
def test_timeout_header(router: Front, value: str) -> None:
    refused(router.chat(headers={"x-request-timeout-seconds": value}), param="x-request-timeout-seconds")


def test_random_bodies_never_break_it(router: Front) -> None:
    """Bodies with one value anywhere replaced: refused or answered, never a fault."""
    chance = random.Random(3)
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1.5,
        1 << 64,
        "",
        "x",
        "\ud800",
        [],
        {},
        [[]],
        {"a": {"b": []}},
        [None],
        "data:image/png;base64,AAAA",
    ]
    base = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "stop": ["x"],
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "seed": 1,
        "user": "x",
    }

    def mutate(node: Any) -> Any:
        if chance.random() < 0.15 or not isinstance(node, dict | list) or not node:
            return chance.choice(values)
        if isinstance(node, dict):
            key = chance.choice(list(node))
            return {**node, key: mutate(node[key])}
        at = chance.randrange(len(node))
        return [*node[:at], mutate(node[at]), *node[at + 1 :]]

    before = {role: len(worker.submits) for role, worker in router.workers.items()}
    router.stage.default = Plan(tokens=(100, 1913))
    with router.client() as client:
        for _ in range(200):
            body = json.dumps(mutate(base)).encode()
            reply = client.post(CHAT, content=body)
            assert reply.status_code in (200, 400, 404), (body, reply.status_code, reply.text)
            assert len(reply.content) < 4096
    for role, worker in router.workers.items():
        del worker.submits[before[role] :]


def test_health_is_quick_while_pictures_are_decoded(router: Front) -> None:
    content = [picture(3000, 3000)] * 3
    asked = [Later(router.chat, content, max_tokens=CONTEXT) for _ in range(4)]
    times = []
    with router.client() as client:
        while any(one.is_running for one in asked):
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            times.append(time.monotonic() - started)
    for one in asked:
        refused(one.result())
    assert len(times) > 10, "twelve pictures take longer than that"
    assert sorted(times)[len(times) // 2] < 0.1


# Metrics ---------------------------------------------------------------------------------------------------------------


def test_metrics_do_not_grow_with_what_clients_send(router: Front) -> None:
    with router.client() as client:
        client.get("/nowhere")
        refused(router.post(CHAT, {"model": "one", "messages": MESSAGES}), 404)
        before = {line.split(" ")[0] for line in client.get("/metrics").text.splitlines() if not line.startswith("#")}
        for number in range(30):
            router.post(CHAT, {"model": f"model-{number}", "messages": MESSAGES})
            client.get(f"/path-{number}")
            client.get(f"/v1/models/model-{number}")
        text = client.get("/metrics").text
        after = {line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    new = {series for series in after - before if "_created" not in series}
    name = "slipstream_router_requests_total"
    assert new <= {f'{name}{{code="200",route="/metrics"}}', f'{name}{{code="404",route="/v1/models/{{name:path}}"}}'}
    for route in ("unmatched", CHAT):
        assert f'{name}{{code="404",route="{route}"}}' in after, "an error is no success"
    assert not any("model-" in series or "path-" in series for series in after)
    assert "SECRETWORD" not in text


def test_nothing_of_a_prompt_is_logged(router: Front) -> None:
    refused(router.post(CHAT, {"model": MODEL, "messages": MESSAGES, "n": 99}))
    assert "SECRETWORD" not in json.dumps(router.log())
    assert set(router.workers) == set(Role)


def test_request_ids(router: Front) -> None:
    names = set()
    for _ in range(2):
        router.answer("ok")
        reply = router.chat(headers={"x-request-id": "client-1"})
        assert reply.headers["x-request-id"] == "client-1"
        names.add(router.stage.last.submits[Role.PREFILL][0].request_id)
    assert len(names) == 2, "a repeated client id names two requests"
    assert any("client-1" in json.dumps(line) for line in router.log())
    for bad in ("a b", "x" * 500, "<script>"):
        router.answer("ok")
        own = router.chat(headers={"x-request-id": bad}).headers["x-request-id"]
        assert own
        assert own != bad
    assert router.post("/nowhere", {}, {"x-request-id": "client-2"}).headers.get("x-request-id") == "client-2"
    for worker in router.workers.values():
        del worker.submits[-5:]  # those were no refusals
