"""What becomes of requests when workers, links or clients fail: a real router process in front of scripted workers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from slipstream.checkpoint import DEMO
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Role
from slipstream.v1 import worker_pb2 as pb
from tests.support.fake_workers import Plan, Seen
from tests.support.scripted_router import MODEL, Front, Later, Streamed, ask_raw, events, front

LONG = tuple(
    Tokenizer(DEMO).encode("The quick brown fox jumps over the lazy dog, and a purple triangle is in row two. " * 3)[:40]
)
WORDY = "m" * 4000


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router"), "router.unread_bytes=4000") as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_left(router: Front) -> Iterator[None]:
    """After each test nothing is in flight, and the next request works."""
    router.stage.forget()
    yield
    router.stage.plans.clear()
    router.until_idle()
    router.answer("fine")
    assert router.chat().json()["choices"][0]["message"]["content"] == "fine"
    with router.client() as client:
        assert "slipstream_router_in_flight 0.0" in client.get("/metrics").text


def cancelled(router: Front, seen: Seen, *roles: Role, seconds: float = 1.0) -> None:
    for role in roles:
        router.stage.until(lambda role=role: bool(seen.cancels[role]), f"{role.value} is told to cancel", seconds)  # type: ignore[misc]


# Busy ------------------------------------------------------------------------------------------------------------------


def test_busy_keeps_the_work(router: Front) -> None:
    router.answer("worth waiting for", busy=4)
    started = time.monotonic()
    assert router.chat().json()["choices"][0]["message"]["content"] == "worth waiting for"
    assert time.monotonic() - started < 2
    seen = router.stage.last
    decodes = seen.submits[Role.DECODE]
    assert [submit.attempt for submit in decodes] == sorted({submit.attempt for submit in decodes})
    assert len(decodes) == 5
    assert {submit.transfer_id for submit in decodes} == {seen.submits[Role.PREFILL][0].transfer_id}
    assert len(seen.submits[Role.PREFILL]) == 1
    assert not seen.cancels[Role.PREFILL]
    remaining = [submit.remaining_ms for submit in decodes]
    assert remaining == sorted(remaining, reverse=True), "the deadline stays where it is"


def test_busy_until_the_deadline(router: Front) -> None:
    router.answer("never", busy=1000)
    reply = router.chat(headers={"x-request-timeout-seconds": "0.6"})
    if reply.status_code == 200:
        pytest.fail("an unanswered request is no 200")
    assert reply.status_code in (503, 504)
    seen = router.stage.last
    cancelled(router, seen, Role.PREFILL)
    assert 3 < len(seen.submits[Role.DECODE]) < 30


def test_another_decode_replica_is_asked(router: Front) -> None:
    other = router.stage.worker(Role.DECODE, replica_id="decode-1")
    router.start([one.address for one in (*router.workers.values(), other)])
    try:
        router.until_healthy()
        router.stage.until(lambda: other.connected, "both are connected")
        for _ in range(4):
            router.answer("ok", busy=1)
            assert router.chat().status_code == 200
            assert set(router.stage.last.workers[Role.DECODE]) == {"decode-0", "decode-1"}
            assert (
                router.stage.last.submits[Role.DECODE][0].transfer_id == router.stage.last.submits[Role.DECODE][1].transfer_id
            )
    finally:
        router.stage.stop(other)


# Legs that fail --------------------------------------------------------------------------------------------------------

CODES = [
    (pb.ERROR_CODE_INVALID, 400),
    (pb.ERROR_CODE_CONTEXT_LENGTH, 400),
    (pb.ERROR_CODE_UNAVAILABLE, 503),
    (pb.ERROR_CODE_DEADLINE, 504),
    (pb.ERROR_CODE_LEASE_EXPIRED, 503),
    (pb.ERROR_CODE_INCOMPATIBLE, 503),
    (pb.ERROR_CODE_INTERNAL, 500),
    (pb.ERROR_CODE_UNSPECIFIED, 500),
]


@pytest.mark.parametrize(("code", "status"), [*CODES, (pb.ERROR_CODE_BUSY, 503)])
@pytest.mark.parametrize("stream", [False, True])
def test_prefill_fails(router: Front, code: Any, status: int, stream: bool) -> None:
    router.answer("never", prefill_error=code)
    if stream:
        answer = router.stream()
        got, headers, error = answer.status, answer.headers, json.loads(answer.body)["error"]
    else:
        reply = router.chat()
        got, headers, error = reply.status_code, reply.headers, reply.json()["error"]
    assert got == status
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"] == "context_length_exceeded") is (code == pb.ERROR_CODE_CONTEXT_LENGTH)
    if status == 503:
        assert int(headers["retry-after"]) >= 1
    cancelled(router, router.stage.last, Role.DECODE)


@pytest.mark.parametrize(("code", "status"), CODES)
def test_decode_fails(router: Front, code: Any, status: int) -> None:
    router.answer("never", decode_error=code, hold_at=0)
    reply = router.chat()
    assert reply.status_code == status
    assert "finish_reason" not in reply.text
    cancelled(router, router.stage.last, Role.PREFILL)


@pytest.mark.parametrize("code", [pb.ERROR_CODE_UNAVAILABLE, pb.ERROR_CODE_LEASE_EXPIRED, pb.ERROR_CODE_INTERNAL])
def test_a_stream_that_breaks(router: Front, code: Any) -> None:
    router.stage.next(Plan(tokens=LONG, decode_error=code, error_at=5, hold_at=4))
    with router.open(stream_options={"include_usage": True}) as response:  # opens once prefill's token has come
        answer = Streamed(status=response.status_code, headers=response.headers)
        router.stage.release(router.held())
        answer.events += events(response)
    assert answer.text in [router.tokenizer.decode(LONG[:count]) for count in range(5, 9)], "a resume may bring a token more"
    assert not answer.reasons
    assert len(answer.errors) == 1
    assert answer.events[-1] == {"error": answer.errors[0]}
    assert "[DONE]" not in answer.events
    router.stage.next(Plan(tokens=LONG, decode_error=code, error_at=5))
    assert router.chat().status_code >= 500


def test_the_official_client_raises_when_a_stream_breaks(router: Front) -> None:
    router.stage.next(Plan(tokens=LONG, decode_error=pb.ERROR_CODE_UNAVAILABLE, error_at=5))
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client, pytest.raises(openai.APIError):
        for _ in client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True):
            pass


def test_prefill_fails_after_its_token(router: Front) -> None:
    router.stage.next(Plan(tokens=LONG, prefill_error=pb.ERROR_CODE_UNAVAILABLE, error_at=1, hold_at=1))
    answer = router.stream()
    assert answer.text == router.tokenizer.decode(LONG[:1])
    assert len(answer.errors) == 1
    cancelled(router, router.stage.last, Role.DECODE)


def test_a_token_that_never_comes_is_asked_for_again(router: Front) -> None:
    router.stage.next(Plan(tokens=LONG, skip=4))
    answer = router.stream(headers={"x-request-timeout-seconds": "10"})
    assert answer.text == router.tokenizer.decode(LONG)
    assert (answer.reasons, answer.errors) == (["stop"], [])
    assert [len(submit.output) for submit in router.stage.last.submits[Role.PREFILL]] == [0, 4]


# Sessions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", list(Role))
def test_a_lost_session_comes_back_and_its_requests_go_on(router: Front, role: Role) -> None:
    router.stage.next(Plan(tokens=LONG, hold_at=0 if role is Role.PREFILL else 5))
    asked = Later(router.stream)
    seen = router.held()
    worker = router.workers[role]
    worker.info.epoch += 1
    router.stage.do(worker.drop_sessions)
    if role is Role.PREFILL:
        cancelled(router, seen, Role.DECODE)
    router.stage.until(lambda: len(seen.submits[Role.PREFILL]) == 2, "it is resumed")
    router.stage.release(seen)
    answer = asked.result(5)
    assert answer.text == router.tokenizer.decode(LONG)
    assert (answer.errors, answer.reasons) == ([], ["stop"])
    router.until_healthy()
    router.answer("again")
    assert router.chat().status_code == 200
    assert router.stage.last.submits[Role.DECODE][0].prefill_epoch == router.workers[Role.PREFILL].info.epoch



# Clients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 1, 5])
def test_a_client_that_leaves(router: Front, stream: bool, hold_at: int) -> None:
    router.stage.next(Plan(tokens=LONG, hold_at=hold_at))
    connection = ask_raw(router, {"stream": stream})
    seen = router.held()
    assert not seen.cancels[Role.DECODE]
    connection.close()
    cancelled(router, seen, Role.DECODE)
    if hold_at == 0:
        cancelled(router, seen, Role.PREFILL)
    router.until_idle(1.0)


def test_a_client_that_leaves_while_decode_is_busy(router: Front) -> None:
    router.answer("never", busy=10000)
    connection = ask_raw(router, {"stream": True})
    router.stage.until(lambda: bool(router.stage.seen) and len(router.stage.last.submits[Role.DECODE]) > 2, "decode is busy")
    seen = router.stage.last
    connection.close()
    cancelled(router, seen, Role.PREFILL)
    router.until_idle(1.0)
    tried = len(seen.submits[Role.DECODE])
    time.sleep(0.7)  # longer than the longest pause between two attempts
    assert len(seen.submits[Role.DECODE]) == tried


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Its chunks are so long that no socket buffer holds an answer."""
    cut_off = "ASGI callable returned without completing response."
    with front(tmp_path_factory.mktemp("wordy"), "router.unread_bytes=2000", model=WORDY, complaints=[cut_off]) as one:
        yield one


def test_a_client_that_does_not_read(wordy: Front) -> None:
    """Its request ends, also if it never reads and never leaves; others are not disturbed."""
    wordy.stage.next(Plan(tokens=LONG * 100))
    connection = ask_raw(wordy, {"stream": True, "model": WORDY})
    try:
        wordy.stage.until(lambda: bool(wordy.stage.seen), "it was submitted")
        seen = wordy.stage.last
        wordy.answer("others")
        assert wordy.chat(model=WORDY).json()["choices"][0]["message"]["content"] == "others"
        cancelled(wordy, seen, Role.DECODE, seconds=5)
        wordy.until_idle(8.0)
    finally:
        connection.close()


def test_a_client_that_reads_late_is_told(wordy: Front) -> None:
    wordy.stage.forget()
    wordy.stage.next(Plan(tokens=LONG * 100))
    with wordy.open(model=WORDY) as response:
        seen = wordy.stage.last
        cancelled(wordy, seen, Role.DECODE, seconds=5)
        try:
            last = list(events(response))[-1]
        except httpx.TransportError:  # the connection may also be closed on it
            return
        assert last["error"]["code"] == "slow_client"


# Deadlines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_before_the_first_token(router: Front, stream: bool) -> None:
    router.stage.next(Plan(tokens=LONG, hold_at=0))
    started = time.monotonic()
    reply = router.chat(stream=stream, headers={"x-request-timeout-seconds": "0.5"})
    assert 0.4 < time.monotonic() - started < 2
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    cancelled(router, router.stage.last, *Role)


def test_deadline_in_a_stream(router: Front) -> None:
    router.stage.next(Plan(tokens=LONG, hold_at=5))
    answer = router.stream(headers={"x-request-timeout-seconds": "0.5"})
    assert answer.text == router.tokenizer.decode(LONG[:5])
    assert [error["code"] for error in answer.errors] == ["deadline_exceeded"]
    cancelled(router, router.stage.last, Role.DECODE)


# Metrics ---------------------------------------------------------------------------------------------------------------


def sample(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.M))


def test_metrics_tell_what_happened(router: Front) -> None:
    def read() -> str:
        with router.client() as client:
            return client.get("/metrics").text

    before = read()
    for _ in range(3):
        router.answer("fine")
        assert router.chat().status_code == 200
    router.answer("never", prefill_error=pb.ERROR_CODE_UNAVAILABLE)
    assert router.chat().status_code == 503
    assert router.chat(n=99).status_code == 400
    router.stage.next(Plan(tokens=LONG, hold_at=3))
    connection = ask_raw(router, {"stream": True})
    router.held()
    connection.close()
    router.until_idle()
    after = read()

    def grown(name: str) -> float:
        return sample(after, name) - sample(before, name)

    assert grown("slipstream_router_ttft_seconds_count") == 4, "requests that gave a token"
    assert grown("slipstream_router_e2e_seconds_count") == 3
    assert grown("slipstream_router_transfer_bytes_total") == 3 * 1024
    assert 'slipstream_router_errors_total{code="cancelled"}' in after
    assert 'slipstream_router_errors_total{code="unavailable"}' in after
