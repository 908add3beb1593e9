"""A request whose replicas fail goes on elsewhere, and its client sees nothing of it: a real router, scripted workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.checkpoint import DEMO
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Role
from slipstream.v1 import worker_pb2 as pb
from tests.support.fake_workers import Plan
from tests.support.scripted_router import Front, Later, ask_raw, front

WORDS = "The quick brown fox jumps over the lazy dog, and a purple triangle is in row two. "
LONG = tuple(Tokenizer(DEMO).encode(3 * WORDS)[:40])


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router")) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_left(router: Front) -> Iterator[None]:
    """After each test nothing is in flight."""
    router.stage.forget()
    yield
    router.stage.plans.clear()
    router.until_idle()


def metric(router: Front, name: str) -> float:
    with router.client() as client:
        text = client.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.M))


def unnamed(submit: pb.Submit) -> pb.Submit:
    """Without what differs from run to run."""
    copied = pb.Submit()
    copied.CopyFrom(submit)
    for name in ("handle", "request_id", "transfer_id", "output", "remaining_ms"):
        copied.ClearField(name)
    return copied


@pytest.mark.parametrize("plan", [
    {"decode_error": pb.ERROR_CODE_UNAVAILABLE, "error_at": 6}, {"decode_error": pb.ERROR_CODE_INTERNAL, "error_at": 1},
    {"decode_error": pb.ERROR_CODE_PREEMPTED, "error_at": 9}, {"prefill_error": pb.ERROR_CODE_LEASE_EXPIRED, "error_at": 1},
    {"prefill_error": pb.ERROR_CODE_UNSPECIFIED}, {"drop_at": 7, "failures": 1}])
@pytest.mark.parametrize("failures", [1, 3])
def test_whatever_fails_the_client_sees_one_whole_answer(router: Front, plan: dict[str, Any], failures: int) -> None:
    """Text, usage and logprobs are those of a request that nothing happened to; the workers hear what is needed to go on."""
    before = metric(router, "slipstream_router_resumes_total")
    first_tokens = metric(router, "slipstream_router_ttft_seconds_count")
    failures = plan.get("failures", failures)
    router.stage.next(Plan(tokens=LONG, **{**plan, "failures": failures}))
    asked: dict[str, Any] = {
        "temperature": 0.5, "seed": 9, "frequency_penalty": 0.25, "max_tokens": 39, "min_tokens": 3, "logprobs": True,
        "stream_options": {"include_usage": True}, "cache_salt": "s", "priority": 2}
    answer = router.stream(**asked)
    assert answer.text == router.tokenizer.decode(LONG[:39])
    assert (answer.reasons, answer.errors) == (["length"], [])
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 39
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    told = [one for choice in choices for one in (choice["logprobs"] or {}).get("content", [])]
    assert [one["logprob"] for one in told] == [-index - 1 for index in range(39)]
    first, *others = router.stage.last.submits[Role.PREFILL]
    assert len(others) == failures
    assert metric(router, "slipstream_router_resumes_total") - before == failures
    assert metric(router, "slipstream_router_ttft_seconds_count") - first_tokens == 1, "of the request, not of each run"
    for number, submit in enumerate(others, 1):
        assert list(submit.output) == list(LONG[: len(submit.output)])
        assert submit.request_id == f"{first.request_id}~{number}"
        assert submit.remaining_ms < first.remaining_ms, "the deadline stays where it is"
        assert unnamed(submit) == unnamed(first), "all else is as it was"


def test_three_choices_are_resumed_each_from_its_own_tokens(router: Front) -> None:
    texts = [LONG, LONG[:3], LONG[::-1]]
    router.stage.next(Plan(tokens=LONG, others=tuple(texts[1:]), decode_error=pb.ERROR_CODE_UNAVAILABLE, error_at=12,
                           failures=1))
    reply = router.chat(n=3)
    assert [one["message"]["content"] for one in reply.json()["choices"]] == [router.tokenizer.decode(text) for text in texts]
    assert [list(submit.choices) for submit in router.stage.last.submits[Role.PREFILL]] == [[0, 1, 2], [0], [2]]
    assert reply.json()["usage"]["completion_tokens"] == len(LONG) * 2 + 3


def test_a_stop_string_may_lie_on_both_sides_of_a_resume(router: Front) -> None:
    tokens = router.answer("one two three four STOP five", stop=False, drop_at=7, failures=1)
    text = router.tokenizer.decode(tokens[:9])
    stop = text[len(router.tokenizer.decode(tokens[:6])) :]
    answer = router.stream(stop=[stop])
    assert (answer.text, answer.reasons) == (text.removesuffix(stop), ["stop"])


def test_the_deadline_holds_while_nobody_is_there_to_resume(router: Front) -> None:
    router.stage.next(Plan(tokens=LONG, hold_at=4))
    asked = Later(router.stream, headers={"x-request-timeout-seconds": "1.5"})
    router.held()
    router.stage.do(router.workers[Role.DECODE].drain)
    router.stage.do(router.workers[Role.DECODE].drop_sessions)
    answer = asked.result(5)
    assert answer.text == router.tokenizer.decode(LONG[:4])
    assert [error["code"] for error in answer.errors] == ["deadline_exceeded"]
    router.workers[Role.DECODE].info.draining = router.workers[Role.DECODE].load.draining = False
    router.stage.do(router.workers[Role.DECODE].beat)
    router.until_healthy()


def test_a_client_may_leave_while_its_request_is_resumed(router: Front) -> None:
    router.stage.next(Plan(tokens=LONG, decode_error=pb.ERROR_CODE_PREEMPTED, error_at=2))
    connection = ask_raw(router, {"stream": True})
    router.stage.until(lambda: bool(router.stage.seen) and len(router.stage.last.submits[Role.DECODE]) > 6,
                       "preempted over and over")
    connection.close()
    router.until_idle(1.0)
