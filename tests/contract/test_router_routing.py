"""Where a router sends requests: by what workers cached, to decode alone, with an empty pool; and what it says of it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from router.policies import POLICIES
from router.workers import Workers
from slipstream import config, config_routing
from slipstream.block_hash import prompt_keys
from slipstream.cache_keys import short
from slipstream.errors import ConfigError
from slipstream.types import Role
from slipstream.v1 import worker_pb2 as pb
from tests.support.fake_workers import FakeWorker, Plan, Script
from tests.support.scripted_router import Front
from tests.support.scripted_workers import Stage

P, D = Role.PREFILL, Role.DECODE
TEXT = "the same long beginning of a prompt that others have asked about before, row by row and word by word " * 3


def workers(stage: Stage, *names: str) -> list[FakeWorker]:
    return [stage.worker(P if name[0] == "p" else D, replica_id=name) for name in names]


def serve(router: Front, those: list[FakeWorker], *overrides: str) -> None:
    """Until the router knows them all, and what they have cached."""
    router.start([one.address for one in those], *overrides)
    with router.client() as client:
        router.stage.until(lambda: all(one["state"] == "ready" for one in client.get("/status").json()["replicas"]),
                           "all are connected", 10)


def metric(router: Front, name: str) -> float:
    with router.client() as client:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"slipstream_router_{name} ")]
    return float(lines[0].split()[-1]) if lines else 0.0


def keys(router: Front, text: str) -> list[int]:
    """Of the whole blocks of a completion's prompt."""
    return short(prompt_keys(router.tokenizer.encode(text), 16))


def complete(router: Front, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    reply = router.post("/v1/completions", {"model": router.model, "prompt": text, "max_tokens": 8, **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def test_policies_have_the_names_that_the_configuration_knows() -> None:
    assert tuple(POLICIES) == config_routing.POLICIES
    with pytest.raises(ConfigError, match=r"router\.policy") as caught:
        config.load(None, ["router.policy=best"])
    assert all(name in caught.value.message for name in POLICIES), "an unknown name lists the known ones"


@pytest.mark.parametrize("policy", ["auto", "prefix"])
def test_a_prompt_goes_where_workers_say_that_it_is_cached(router: Front, stage: Stage, policy: str) -> None:
    those = workers(stage, "p0", "p1", "p2", "d0", "d1", "d2")
    for one in (those[1], those[5]):
        one.cached = set(keys(router, TEXT))
    serve(router, those, f"router.policy={policy}", "router.routing.predict_seconds=0")

    def goes() -> dict[Role, list[str]]:
        router.answer("ok")
        complete(router)
        return stage.last.workers

    stage.until(lambda: goes() == {P: ["p1"], D: ["d2"]}, "the index is told")
    assert [goes() for _ in range(3)] == [{P: ["p1"], D: ["d2"]}] * 3
    router.answer("ok")
    complete(router, cache_salt="another tenant")
    assert stage.last.workers != {P: ["p1"], D: ["d2"]}, "what a tenant has cached is no other's"

    def moved() -> None:  # the cache of p1 is gone, and p2 has it
        held = sorted(those[1].cached)
        those[1].number += 1
        those[1].say(pb.WorkerMessage(step=pb.StepReport(cache=pb.CacheChanges(number=those[1].number, removed=held))))
        those[2].number += 1
        those[2].say(pb.WorkerMessage(step=pb.StepReport(cache=pb.CacheChanges(number=those[2].number, snapshots=held))))

    stage.do(moved)

    stage.until(lambda: goes()[P] == ["p2"], "the prompt follows the cache")


def test_what_was_just_routed_counts_as_cached_there(router: Front, stage: Stage) -> None:
    serve(router, workers(stage, "p0", "p1", "p2", "p3", "d0"))
    chosen = set()
    for _ in range(6):
        router.answer("ok")
        complete(router)
        chosen.update(stage.last.workers[P])
    assert len(chosen) == 1


def test_news_that_are_missing_are_asked_for_again(router: Front, stage: Stage) -> None:
    those = workers(stage, "p0", "p1", "d0")
    serve(router, those, "router.routing.predict_seconds=0")
    stage.until(lambda: those[1].watches == 1, "the router asks what is cached")

    def lose() -> None:
        those[1].cached, those[1].number = set(keys(router, TEXT)), 9
        those[1].say(pb.WorkerMessage(step=pb.StepReport(cache=pb.CacheChanges(number=9, blocks=[1]))))

    stage.do(lose)
    stage.until(lambda: those[1].watches == 2, "it asks again")
    stage.until(lambda: metric(router, "prefix_keys") == len(those[1].cached), "it is told")
    router.answer("ok")
    complete(router)
    assert stage.last.workers[P] == ["p1"]
    stage.do(those[1].drop_sessions)
    stage.until(lambda: those[1].watches == 3, "and after a Session that was lost")


def test_policies_that_ask_no_cache_watch_none(router: Front, stage: Stage) -> None:
    those = workers(stage, "p0", "p1", "d0", "d1")
    serve(router, those, "router.policy=round_robin")
    pairs = []
    for _ in range(4):
        router.answer("ok")
        complete(router)
        pairs.append((stage.last.workers[P][0], stage.last.workers[D][0]))
    assert len(set(pairs)) == 4, "every pair in turn"
    assert not any(one.watches for one in those)


# Decode alone ------------------------------------------------------------------------------------------------------------


LOCAL = "router.routing.local_prefill_tokens=1000"


def test_a_short_prompt_is_computed_by_decode_where_that_is_allowed(router: Front, stage: Stage) -> None:
    serve(router, workers(stage, "p0", "d0"), LOCAL)
    right = router.answer("a whole answer of some words")
    body = complete(router, n=2, max_tokens=64, logprobs=1)
    assert [choice["text"] for choice in body["choices"]] == ["a whole answer of some words"] * 2
    (submit,) = stage.last.submits[D]
    assert (submit.local, list(submit.prefill_addresses), list(submit.choices)) == (True, [], [0, 1])
    assert stage.last.submits[P] == []
    assert body["usage"]["completion_tokens"] == 2 * len(right)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == len(submit.tokens) // 2
    assert metric(router, 'local_prefills_total{reason="short"}') == 1
    assert metric(router, "transfer_seconds_count") == 0, "nothing was transferred"
    router.answer("seen")
    assert router.chat([{"type": "text", "text": "look"}, picture()]).status_code == 200
    assert stage.last.submits[P], "decode never sees pictures"


def picture() -> dict[str, Any]:
    from tests.support.scripted_router import picture as make

    return make(32, 32)


def test_decode_alone_may_be_busy_or_fail_and_the_request_goes_on(router: Front, stage: Stage) -> None:
    serve(router, workers(stage, "p0", "d0", "d1"), LOCAL)
    router.answer("in the end", busy=2)
    assert complete(router)["choices"][0]["text"] == "in the end"
    assert [submit.attempt for submit in stage.last.submits[D]] == [0, 1, 2]
    assert len(set(stage.last.workers[D])) == 2
    router.answer("one two three four", decode_error=pb.ERROR_CODE_PREEMPTED, error_at=2, failures=1)
    assert complete(router, max_tokens=64)["choices"][0]["text"] == "one two three four"
    assert len(stage.last.submits[D][1].output) == 2


def test_a_prompt_whose_logprobs_are_wanted_counts_as_not_cached(router: Front, stage: Stage) -> None:
    those = workers(stage, "p0", "d0")
    those[1].cached = set(keys(router, TEXT))
    serve(router, those, "router.routing.local_prefill_tokens=20", "router.routing.predict_seconds=0")
    stage.until(lambda: metric(router, "prefix_keys") == len(those[1].cached), "it is told")
    for wanted in None, 1:
        router.answer("ok")
        complete(router, prompt_logprobs=wanted)
        assert stage.last.submits[D][0].local is (wanted is None)


def test_a_client_that_leaves_cancels_decode_alone(router: Front, stage: Stage) -> None:
    serve(router, workers(stage, "p0", "d0"), LOCAL)
    router.answer("never seen whole", hold_at=2)
    with router.open("/v1/completions", prompt="hello", max_tokens=64) as response:
        next(response.iter_lines())
        router.held()
    stage.until(lambda: stage.last.cancels[D] == [0], "decode is told")
    assert stage.last.cancels[P] == []
    router.until_idle()


# An empty pool -----------------------------------------------------------------------------------------------------------


def test_without_prefill_requests_fail_by_default_and_say_why(router: Front, stage: Stage) -> None:
    """RT-11: no fallback that nobody asked for."""
    those = workers(stage, "p0", "d0")
    serve(router, those, "router.resume_wait_seconds=0.5")
    router.answer("never", prefill_error=pb.ERROR_CODE_UNAVAILABLE)
    stage.do(those[0].drain)
    stage.until(lambda: "prefill" in str(router.until_healthy(503)), "the pool is empty")
    reply = router.post("/v1/completions", {"model": router.model, "prompt": "hello"})
    assert reply.status_code == 503
    assert "prefill" in reply.json()["error"]["message"]
    assert int(reply.headers["retry-after"]) >= 1
    assert those[1].submits == []
    assert metric(router, 'local_prefills_total{reason="empty_pool"}') == 0


def test_without_prefill_decode_computes_texts_where_that_was_asked_for_and_it_is_counted(router: Front, stage: Stage) -> None:
    """RT-11: a fallback is opt-in and counted. A request whose prefill is lost goes on there; pictures have nowhere to go."""
    those = workers(stage, "p0", "d0")
    serve(router, those, "router.empty_prefill_pool=local", "router.resume_wait_seconds=0.5")
    stage.next(Plan(tokens=(*router.tokenizer.encode("goes on"), 1913), prefill_error=pb.ERROR_CODE_UNAVAILABLE, failures=1))
    stage.do(those[0].drain)
    stage.until(lambda: replicas(router)["p0"] == "draining", "the pool is empty")
    assert router.until_healthy()
    assert complete(router)["choices"][0]["text"] == "goes on"
    assert those[0].submits == []
    assert metric(router, 'local_prefills_total{reason="empty_pool"}') == 1
    reply = router.chat([{"type": "text", "text": "look"}, picture()])
    assert reply.status_code == 503
    assert "prefill" in reply.json()["error"]["message"]
    stage.worker(P, those[0].address.rpartition(":")[0] + ":0", replica_id="p1")


def replicas(router: Front) -> dict[str, str]:
    with router.client() as client:
        return {one["replica_id"]: one["state"] for one in client.get("/status").json()["replicas"]}


# Explaining --------------------------------------------------------------------------------------------------------------


def told(router: Front, name: str) -> dict[str, Any]:
    with router.client() as client:
        reply = client.get(f"/explain/{name}")
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def test_a_request_is_explained_by_any_of_its_names(router: Front, stage: Stage) -> None:
    those = workers(stage, "p0", "p1", "d0")
    those[1].cached = set(keys(router, TEXT))
    serve(router, those, "router.routing.decisions=3", "router.routing.predict_seconds=0")
    stage.until(lambda: metric(router, "prefix_keys") > 0, "the index is told")
    router.answer("one two three", busy=1, decode_error=pb.ERROR_CODE_UNAVAILABLE, error_at=2, failures=1)
    reply = router.post("/v1/completions", {"model": router.model, "prompt": TEXT}, {"x-request-id": "mine:1"})
    whole = told(router, "mine:1")
    assert whole["request_id"].startswith("mine:1-req-")
    for name in (whole["request_id"], reply.json()["id"]):  # prefill's end may come after the answer
        assert told(router, name)["events"][: len(whole["events"])] == whole["events"]
    names = [event["event"] for event in whole["events"]]
    assert [name for name in names if name != "leg ended"] == [
        "decided", "leg failed", "decode again", "leg failed", "resume", "decided", "ended"]
    first = whole["events"][0]
    assert (first["policy"], first["prefill"], first["decode"]) == ("auto", "p1", "d0")
    scores = {one["replica"]: one for one in first["candidates"]}
    assert set(scores) == {"p0", "p1", "d0"}
    assert scores["p1"]["cached_tokens"] == 16 * len(those[1].cached)
    assert scores["p1"]["cost_seconds"] < scores["p0"]["cost_seconds"], "a score says why"
    assert [one["chosen"] for one in scores.values()].count(True) == 2
    assert whole["events"][names.index("ended")]["code"] == "ok"
    assert TEXT[:20] not in json.dumps(whole), "nothing of the prompt"
    said = subprocess.run([sys.executable, "-m", "launch", "explain", "mine:1", "--url", router.url], capture_output=True,
                          text=True, timeout=30, check=True).stdout
    assert "p1 -> d0" in said
    assert "the least cost of all pairs" in said
    assert "resume" in said
    for _ in range(3):
        router.answer("ok")
        complete(router)
    with router.client() as client:
        gone = client.get("/explain/mine:1")
    assert gone.status_code == 404, "the last three are kept"
    assert "router.routing.decisions" in gone.json()["error"]["message"]


# Names -------------------------------------------------------------------------------------------------------------------


def test_workers_are_found_by_a_name(router: Front, stage: Stage) -> None:
    port = int(stage.worker(P).address.rpartition(":")[2])
    decode = stage.worker(D)
    router.start([decode.address], dns=f"localhost:{port}")
    router.until_healthy()
    router.answer("ok")
    complete(router)


async def test_a_name_that_changes_is_followed_and_one_that_is_gone_keeps_what_is_known(
        monkeypatch: pytest.MonkeyPatch) -> None:
    script, answers = Script(), list[list[str]]()
    those = [FakeWorker(script, P, replica_id=f"p{number}") for number in range(3)]
    await those[0].start("127.0.0.1:0")
    port = int(those[0].address.rpartition(":")[2])
    for number in (1, 2):
        await those[number].start(f"127.0.0.{number + 1}:{port}")
    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "workers.example"
        asked.set()
        if not answers[-1]:
            raise socket.gaierror(-2, "Name or service not known")
        found: list[Any] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers[-1]]
        return [*found, (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))]  # the same ones once more

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    known = Workers("demo_model", lambda: None)

    async def until(names: set[str]) -> None:
        async with asyncio.timeout(5):
            while {view.name for view in known.views() if not view.draining} != names:  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0.01)

    answers.append(["127.0.0.1", "127.0.0.2"])
    known.add(those[2].address)
    known.resolve(f"workers.example:{port}", 0.01)
    await until({"p0", "p1", "p2"})
    answers.append(["127.0.0.2"])
    await until({"p1", "p2"})
    answers.append([])
    asked.clear()
    await asked.wait()
    asked.clear()
    await asked.wait()
    await until({"p1", "p2"})
    answers.append(["127.0.0.1", "127.0.0.3"])
    await until({"p0", "p2"})
    assert len(known.links()) == 2, "who is named no more is forgotten"
    await known.close()
    for one in those:
        await one.stop()
