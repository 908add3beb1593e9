"""A router among workers that say nonsense and clients that want too much: one request suffers, never the next."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.dispatch import Row
from router.link import WorkerLink
from router.openai import chat_request
from router.prompt import PictureBytes, PromptBuilder, Share
from router.service import PROMPT_THREADS
from slipstream.checkpoint import DEMO
from slipstream.config import RouterConfig
from slipstream.errors import CancelledError, SlipstreamError
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Role
from slipstream.v1 import worker_pb2 as pb
from tests.support.fake_workers import FakeWorker, Plan, Script
from tests.support.scripted_router import (
    CHAT,
    CHECKPOINT,
    COMPLETIONS,
    CONTEXT,
    MODEL,
    Front,
    Later,
    events,
    front,
    picture,
    refused,
)

LONG = tuple(Tokenizer(DEMO).encode("The quick brown fox jumps over the lazy dog, and a purple triangle is in row two."))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router"), complaints=None) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_left(router: Front) -> Iterator[None]:
    """After each test nothing is in flight, and the next request works."""
    router.stage.forget()
    yield
    router.stage.plans.clear()
    router.until_healthy()
    router.until_idle()
    router.answer("fine")
    assert router.chat().json()["choices"][0]["message"]["content"] == "fine"


def connect(router: Front, data: bytes, length: int, headers: str = "") -> socket.socket:
    host, port = router.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10.0)
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{headers}\r\n".encode() + data)
    return connection


# Workers ---------------------------------------------------------------------------------------------------------------


def test_a_report_of_unequal_columns_costs_the_session(router: Front) -> None:
    router.stage.next(Plan(tokens=LONG, hold_at=2))
    asked = Later(router.stream)
    seen = router.held()
    handle = seen.submits[Role.DECODE][0].handle
    torn = pb.StepReport(handle=[handle, handle], attempt=[0], index=[5], token=[7])
    router.stage.do(lambda: router.workers[Role.DECODE].say(pb.WorkerMessage(step=torn)))
    router.stage.until(lambda: bool(seen.cancels[Role.PREFILL]), "prefill is told")
    router.stage.until(lambda: len(seen.submits[Role.DECODE]) == 2, "it is resumed on a new session")
    router.stage.release(seen)
    assert asked.result().text == router.tokenizer.decode(LONG)


@pytest.mark.parametrize(
    "last",
    [
        pb.StepReport(handle=[0], attempt=[0], choice=[0], index=[2**32 - 1], token=[7],
                      finish=[pb.FINISH_REASON_LENGTH]),
        pb.StepReport(handle=[0], attempt=[0], choice=[3], index=[2], token=[7], finish=[pb.FINISH_REASON_STOP]),
        pb.StepReport(finished=[pb.Finished(handed_off=True)]),
        pb.StepReport(finished=[pb.Finished()]),
        pb.StepReport(failed=[pb.Failed(message="what is this", code=77)]),  # type: ignore[arg-type]
    ],
)
def test_nonsense_about_one_request_is_asked_again(router: Front, last: pb.StepReport) -> None:
    """Nothing of it is shown, and another request on the same Session is not disturbed."""
    router.stage.next(Plan(tokens=LONG, hold_at=2))
    neighbour = Later(router.stream)
    other = router.held()
    router.stage.next(Plan(tokens=LONG, hold_at=2))
    asked = Later(router.stream)
    router.stage.until(lambda: len(router.stage.seen) == 2 and router.stage.last.held.is_set(), "both are held")
    handle = router.stage.last.submits[Role.DECODE][0].handle
    report = pb.StepReport()
    report.CopyFrom(last)
    for finished in report.finished:
        finished.handle = handle
    for failed in report.failed:
        failed.handle = handle
    if report.handle:
        report.handle[0] = handle
        report.finished.add(handle=handle)
    for _ in range(2):
        router.stage.do(lambda: router.workers[Role.DECODE].say(pb.WorkerMessage(step=report)))
    seen = router.stage.last
    router.stage.until(lambda: len(seen.submits[Role.DECODE]) == 2, "it is resumed")
    router.stage.release(seen)
    assert asked.result().text == router.tokenizer.decode(LONG)
    assert len(other.submits[Role.DECODE]) == 1
    router.stage.release(other)
    assert neighbour.result().text == router.tokenizer.decode(LONG)


def test_news_for_nobody_changes_nothing(router: Front) -> None:
    router.stage.next(Plan(tokens=LONG, hold_at=2))
    asked = Later(router.stream)
    seen = router.held()
    strange = pb.StepReport(
        handle=[987654321], attempt=[3], choice=[9], index=[0], token=[4],
        finished=[pb.Finished(handle=987654321)], failed=[pb.Failed(handle=5, attempt=8)],
    )
    for message in (pb.WorkerMessage(), pb.WorkerMessage(step=strange), pb.WorkerMessage(step=pb.StepReport())):
        for worker in router.workers.values():
            router.stage.do(lambda worker=worker, message=message: worker.say(message))  # type: ignore[misc]
    router.stage.release(seen)
    assert asked.result().text == router.tokenizer.decode(LONG)


def test_a_worker_that_came_back_is_asked_under_its_new_epoch(router: Front) -> None:
    worker = router.workers[Role.PREFILL]
    before = worker.info.epoch
    router.stage.do(worker.drop_sessions)
    worker.info.epoch = before + 1
    router.stage.until(lambda: _epoch(router) == before + 1, "the router has seen it")
    router.answer("ok")
    assert router.chat().status_code == 200
    assert router.stage.last.submits[Role.DECODE][0].prefill_epoch == before + 1


def _epoch(router: Front) -> int | None:
    with router.client() as client:
        replicas = client.get("/status").json()["replicas"]
    return next((one["epoch"] for one in replicas if one["role"] == "prefill"), None)


@pytest.mark.parametrize(("code", "status", "words"), [
    (grpc.StatusCode.UNAVAILABLE, 503, "UNAVAILABLE no room for pictures"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 413, "no room for pictures; send a smaller picture, or fewer or smaller frames")])
def test_a_refused_picture_ends_its_request(router: Front, code: grpc.StatusCode, status: int, words: str) -> None:
    """No room for now, or too large for ever."""
    worker = router.workers[Role.PREFILL]
    worker.refuses_pictures = code
    try:
        router.answer("never")
        error = refused(router.chat([picture(64, 64), picture(64, 64, 9)]), status)
    finally:
        worker.refuses_pictures = None
    assert words in error["message"]
    seen = router.stage.last
    for role in Role:
        router.stage.until(lambda role=role: bool(seen.cancels[role]), f"{role.value} is told")  # type: ignore[misc]


class Ear:
    """A leg's sink that notes, or breaks."""

    def __init__(self, breaks: bool) -> None:
        self.breaks = breaks
        self.heard: list[Any] = []
        self.ended = asyncio.Event()

    def on_tokens(self, attempt: int, rows: Sequence[Row]) -> None:
        self.heard.append([(row.index, row.token) for row in rows])
        if self.breaks:
            raise KeyError("a bug")

    def on_computed(self, message: pb.Finished) -> None:
        self.heard.append("computed")

    def on_finished(self, message: pb.Finished) -> None:
        self.heard.append("finished")
        self.ended.set()

    def on_failed(self, attempt: int, error: SlipstreamError) -> None:
        self.heard.append(error.code)

    def on_fault(self, error: SlipstreamError) -> None:
        self.heard.append(error.code)


async def test_a_fault_in_one_requests_handling_keeps_the_session() -> None:
    script = Script()
    script.default = Plan(tokens=(7, 8), hold_at=0)
    worker = FakeWorker(script, Role.PREFILL)
    await worker.start()
    changed = asyncio.Event()
    link = WorkerLink(worker.address, lambda link, info: None, changed.set)
    try:
        await asyncio.wait_for(changed.wait(), 5.0)
        assert link.ready
        broken, whole = Ear(breaks=True), Ear(breaks=False)
        for handle, ear in ((1, broken), (2, whole)):
            link.submit(pb.Submit(handle=handle, request_id=f"r{handle}", max_tokens=2), ear)
            await asyncio.wait_for(script.see(f"r{handle}").held.wait(), 5.0)
        for index in (1, 2):
            step = pb.StepReport(handle=[1, 2], attempt=[0, 0], choice=[0, 0], index=[index] * 2, token=[7, 8],
                                 finish=[pb.FINISH_REASON_UNSPECIFIED] * 2)
            worker.say(pb.WorkerMessage(step=step))
        computed = [pb.Finished(handle=2), pb.Finished(handle=2, attempt=1), pb.Finished(handle=3)]
        worker.say(pb.WorkerMessage(step=pb.StepReport(computed=computed, finished=[pb.Finished(handle=2)])))
        await asyncio.wait_for(whole.ended.wait(), 5.0)
        assert whole.heard == [[(1, 8)], [(2, 8)], "computed", "finished"]
        assert broken.heard == [[(1, 7)], "internal"], "it is told once, and then left alone"
        assert link.ready
        assert link.idle
    finally:
        await link.close()
        await worker.stop()


# Clients ---------------------------------------------------------------------------------------------------------------


def test_clients_that_leave_while_their_prompts_wait_for_a_thread(router: Front) -> None:
    """Their places are free at once, and no worker hears of those that had no thread yet."""
    content = [picture(4000, 4000, colour) for colour in range(3)]
    data = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
    connections = [connect(router, data, len(data)) for _ in range(6)]
    with router.client() as client:
        router.stage.until(lambda: client.get("/status").json()["in_flight"] == 6, "all have come")
        for connection in connections:
            connection.close()
        router.stage.until(lambda: client.get("/status").json()["in_flight"] == 0, "all have gone")
    assert len(router.stage.seen) <= PROMPT_THREADS


def test_decoded_pictures_of_all_requests_share_one_bound(tmp_path: Path) -> None:
    """96x96 pixels are 27,648 bytes: there is room for two such pictures, whoever sends them."""
    with front(tmp_path, "router.max_pictures_bytes=60000") as router:
        assert "60000" in refused(router.chat([picture(96, 96)] * 3), 413)["message"]
        assert not router.stage.seen
        router.answer("one", hold_at=0)
        asked = Later(router.chat, [picture(96, 96)] * 2)
        seen = router.held()
        late = router.chat([picture(96, 96)])
        assert refused(late, 429)["code"] == "overloaded"
        assert int(late.headers["retry-after"]) >= 1
        router.answer("words need no room")
        assert router.chat().status_code == 200
        router.stage.release(seen)
        assert asked.result().status_code == 200
        router.until_idle()
        router.answer("two")
        assert router.chat([picture(96, 96)] * 2).status_code == 200


def test_room_for_pictures_comes_back_from_whoever_leaves_or_fails(tmp_path: Path) -> None:
    with front(tmp_path, "router.max_pictures_bytes=60000") as router:
        for _ in range(3):
            router.stage.next(Plan(tokens=LONG, hold_at=0))
            body = {"model": MODEL, "messages": [{"role": "user", "content": [picture(96, 96)] * 2}]}
            data = json.dumps(body).encode()
            connection = connect(router, data, len(data))
            router.held()
            connection.close()
            router.until_idle()
            router.stage.forget()
            torn = {"type": "image_url", "image_url": {"url": picture(96, 96)["image_url"]["url"][:-40]}}
            refused(router.chat([picture(96, 96), torn]))
            refused(router.chat([picture(96, 96)], max_tokens=CONTEXT))


def test_nobody_decodes_for_a_client_that_has_left() -> None:
    """The work stops at the next picture, which is never looked at."""
    builder, everything = PromptBuilder(CHECKPOINT, RouterConfig()), PictureBytes(60_000)
    share, sizes = Share(everything), list[int]()

    def take(size: int) -> None:
        share.take(size)
        sizes.append(size)
        share.close()

    asked = chat_request({"model": MODEL, "messages": [{"role": "user", "content": [picture(96, 96)] * 3}]})
    with pytest.raises(CancelledError):
        builder.chat(asked.messages, take)
    assert sizes == [3 * 96 * 96]
    assert everything.taken == 0


def test_the_deadline_covers_the_making_of_the_prompt(router: Front) -> None:
    content = [picture(2500, 2500, colour) for colour in range(3)]
    busy = [Later(router.chat, content, max_tokens=CONTEXT) for _ in range(2)]
    error = refused(router.chat(content, headers={"x-request-timeout-seconds": "0.1"}), 504)
    assert error["code"] == "deadline_exceeded"
    for one in busy:
        refused(one.result())
    assert not router.stage.seen


def test_a_body_that_never_ends_is_given_up(router: Front) -> None:
    started = time.monotonic()
    with connect(router, b'{"model": "', 1000, "x-request-timeout-seconds: 0.2\r\n") as connection:
        assert b" 504 " in connection.recv(4096).split(b"\r\n")[0]
    assert time.monotonic() - started < 3.0


def test_texts_far_too_long_are_refused_without_reading_them_to_the_end(router: Front) -> None:
    started = time.monotonic()
    for body in (
        {"prompt": "lorem ipsum " * 1_500_000},
        {"prompt": "<|im_end|>" * 500_000},
    ):
        error = refused(router.post(COMPLETIONS, {"model": MODEL, **body}), param="prompt")
        assert error["code"] == "context_length_exceeded"
        numbers = [int(number) for number in re.findall(r"\d+", error["message"])]
        assert CONTEXT in numbers
        assert max(numbers) > CONTEXT
    assert time.monotonic() - started < 10.0, "to the end it takes a minute"


def test_huge_numbers_and_endless_lists_are_the_clients_mistakes(router: Front) -> None:
    before = router.complaints()
    start = b'{"model": "' + MODEL.encode() + b'", "messages": [{"role": "user", "content": "x"}], '
    assert refused(router.post(CHAT, start + b'"temperature": 1' + b"0" * 400 + b"}"))["param"] == "temperature"
    began = time.monotonic()
    refused(router.post(CHAT, start + b'"x": [' + b"[]," * (16 << 20) + b"1]}"))
    assert time.monotonic() - began < 5.0
    assert router.complaints() == before


def test_a_stream_counts_as_what_ended_it(router: Front) -> None:
    def count(code: int) -> float:
        with router.client() as client:
            text = client.get("/metrics").text
        name = re.escape(f'slipstream_router_requests_total{{code="{code}",route="{CHAT}"}}')
        return sum(float(value) for value in re.findall(rf"^{name} ([0-9.]+)$", text, re.M))

    well, badly = count(200), count(503)
    router.answer("fine")
    assert router.stream().text == "fine"
    router.stage.next(Plan(tokens=LONG, decode_error=pb.ERROR_CODE_UNAVAILABLE, error_at=3, hold_at=2))
    with router.open() as response:  # opens once prefill's token has come
        router.stage.release(router.held())
        assert "error" in list(events(response))[-1]
    router.until_idle()
    assert (count(200), count(503)) == (well + 1, badly + 1)
