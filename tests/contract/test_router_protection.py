"""Turns, API keys and breakers of a real router, before scripted workers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from slipstream.types import Role
from slipstream.v1 import worker_pb2
from tests.support.fake_workers import Plan
from tests.support.scripted_router import CHAT, MODEL, Front, Later
from tests.support.scripted_workers import Stage


def start(router: Front, stage: Stage, *overrides: str) -> None:
    router.start([stage.worker(role).address for role in Role], *overrides)
    router.until_healthy()


def replicas(router: Front) -> list[str]:
    with router.client() as client:
        return [one["replica_id"] for one in client.get("/status").json()["replicas"] if one["state"] == "ready"]


def waiting(router: Front) -> tuple[int, int]:
    with router.client() as client:
        status = client.get("/status").json()
        return status["in_flight"], status["waiting"]


def next_is_held(stage: Stage, number: int) -> bool:
    return len(stage.seen) == number and stage.last.held.is_set()


# Turns -----------------------------------------------------------------------------------------------------------------


def test_who_waits_runs_by_priority(router: Front, stage: Stage) -> None:
    start(router, stage, "router.max_in_flight=1", "router.max_waiting=2")
    stage.default = Plan(tokens=(5, 6, 7), hold_at=1)
    first = Later(router.chat, "first")
    router.held()
    later = Later(router.chat, "later", priority=9)
    stage.until(lambda: waiting(router) == (2, 1), "one waits")
    sooner = Later(router.chat, "sooner", priority=1)
    stage.until(lambda: waiting(router) == (3, 2), "two wait")
    full = router.chat("too many", priority=9)
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    urgent = Later(router.chat, "urgent", priority=0)
    lost = later.result()
    assert lost.status_code == 429
    assert lost.json()["error"]["code"] == "overloaded"
    for number, one in enumerate((first, urgent, sooner), 1):
        stage.until(partial(next_is_held, stage, number), "the next one runs")
        stage.release(stage.last)
        assert one.result().status_code == 200
    order = [seen.submits[Role.PREFILL][0].priority for seen in stage.seen.values()]
    assert order == [0, 0, 1], "and what was refused reached no worker"
    router.until_idle()


def test_a_wait_ends(router: Front, stage: Stage) -> None:
    start(router, stage, "router.max_in_flight=1", "router.max_waiting_seconds=0.3")
    stage.default = Plan(tokens=(5, 6, 7), hold_at=1)
    running = Later(router.chat)
    held = router.held()
    for headers, status in (({}, 429), ({"x-request-timeout-seconds": "0.1"}, 504)):
        refused = router.chat(headers=headers)
        assert refused.status_code == status, refused.text
        assert waiting(router) == (1, 0)
    stage.release(held)
    assert running.result().status_code == 200


def test_a_client_that_leaves_gives_its_place_back(router: Front, stage: Stage) -> None:
    start(router, stage, "router.max_in_flight=1")
    stage.default = Plan(tokens=(5, 6, 7), hold_at=1)
    running = Later(router.chat)
    held = router.held()
    with pytest.raises(httpx.ReadTimeout), router.client() as client:
        client.post(CHAT, json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]}, timeout=0.3)
    stage.until(lambda: waiting(router) == (1, 0), "its place is free")
    stage.release(held)
    assert running.result().status_code == 200


# Keys ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(router: Front, stage: Stage, tmp_path: Path) -> Front:
    """A router with two keys."""
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[keys.{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{limits}\n'
                            for name, limits in (("alice", ""), ("bob", "requests_per_minute = 2"))))
    start(router, stage, f"router.keys_file={path}", "router.open_metrics=false")
    return router


def test_without_a_key_only_the_probes_answer(locked: Front) -> None:
    with locked.client() as client:
        paths = ("/live", "/health", "/metrics", "/status", "/v1/models", f"/v1/models/{MODEL}", "/nowhere",
                 "/v1/chat/completions/", "//v1/models", "/V1/models", "/health/", "/health/../v1/models")
        open_paths = {path for path in paths if client.get(path).status_code != 401}
        assert open_paths == {"/live", "/health"}
        for headers in ({}, {"authorization": "Bearer carol"}, {"authorization": "Bearer"}):
            for path in (CHAT, "/v1/completions"):
                refused = client.post(path, content=b"{", headers=headers)
                assert refused.status_code == 401, "before the body is looked at"
                assert refused.headers["www-authenticate"] == "Bearer"
                assert refused.json()["error"]["code"] == "invalid_api_key"


def test_keys_open(locked: Front, stage: Stage) -> None:
    locked.answer("Yes.")
    client = openai.OpenAI(base_url=locked.url + "/v1", api_key="alice", max_retries=0)
    reply = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}])
    assert reply.choices[0].message.content == "Yes."
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=locked.url + "/v1", api_key="mallory", max_retries=0).models.list()
    with locked.client() as http:
        assert "slipstream_router" in http.get("/metrics", headers={"authorization": "Bearer bob"}).text


def test_one_key_is_limited_and_no_other(locked: Front, stage: Stage) -> None:
    stage.default = Plan(tokens=(5, 6))
    bob, alice = ({"authorization": f"Bearer {name}"} for name in ("bob", "alice"))
    assert [locked.chat(headers=bob).status_code for _ in range(3)] == [200, 200, 429]
    refused = locked.chat(headers=bob)
    assert "requests_per_minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert locked.chat(headers=alice).status_code == 200


def test_a_key_never_leaves_the_router(locked: Front, stage: Stage) -> None:
    stage.default = Plan(tokens=(5, 6))
    assert locked.chat(headers={"authorization": "Bearer alice"}).status_code == 200
    submits = [submit for seen in stage.seen.values() for of in seen.submits.values() for submit in of]
    assert submits
    assert not any(b"alice" in submit.SerializeToString() for submit in submits)


# Breakers --------------------------------------------------------------------------------------------------------------


def test_a_replica_that_fails_gets_nothing_for_a_while(router: Front, stage: Stage) -> None:
    workers = [stage.worker(Role.PREFILL), stage.worker(Role.DECODE), stage.worker(Role.DECODE, replica_id="decode-1")]
    router.start([worker.address for worker in workers], "router.breaker_failures=1", "router.breaker_seconds=60")
    stage.until(lambda: len(replicas(router)) == 3, "all are there")
    stage.next(Plan(tokens=(5, 6, 7), decode_error=worker_pb2.ERROR_CODE_INTERNAL, error_at=1, failures=1))
    assert router.chat().status_code == 200, "it goes on at the other one"
    [failing, other] = stage.last.workers[Role.DECODE]
    stage.default = Plan(tokens=(5, 6, 7))
    for _ in range(5):
        assert router.chat().status_code == 200
        assert stage.last.workers[Role.DECODE] == [other] != [failing]
    with router.client() as client:
        assert 'slipstream_router_breakers_opened_total{role="decode"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize("code", [worker_pb2.ERROR_CODE_INVALID, worker_pb2.ERROR_CODE_BUSY])
def test_mistakes_of_clients_and_lack_of_memory_open_nothing(code: worker_pb2.ErrorCode.ValueType, router: Front,
                                                             stage: Stage) -> None:
    start(router, stage, "router.breaker_failures=1", "router.breaker_seconds=60")
    for _ in range(3):
        stage.next(Plan(tokens=(5, 6), busy=2) if code == worker_pb2.ERROR_CODE_BUSY else Plan(prefill_error=code))
        assert router.chat().status_code == (200 if code == worker_pb2.ERROR_CODE_BUSY else 400)
    with router.client() as client:
        assert 'breakers_opened_total{role="' not in client.get("/metrics").text


def test_a_lone_replica_is_asked_however_often_it_failed(router: Front, stage: Stage) -> None:
    start(router, stage, "router.breaker_failures=1", "router.breaker_seconds=60", "router.max_resumes=0")
    stage.next(Plan(tokens=(5, 6, 7), decode_error=worker_pb2.ERROR_CODE_INTERNAL, error_at=1))
    assert router.chat().status_code == 500
    stage.next(Plan(tokens=(5, 6, 7)))
    assert router.chat().status_code == 200


# The commands ----------------------------------------------------------------------------------------------------------


def test_the_commands_take_a_key(locked: Front, stage: Stage) -> None:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch", *arguments, "--url", locked.url]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, **environment})

    refused = run("status")
    assert refused.returncode == 1
    assert "--api-key" in refused.stderr
    assert run("status", "--api-key", "alice").returncode == 0
    assert run("transfers", SLIPSTREAM_API_KEY="bob").returncode == 0
    locked.answer("Yes.")
    assert run("chat", "?", "--api-key", "alice").stdout == "Yes.\n"
