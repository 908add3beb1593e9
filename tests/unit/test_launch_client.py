"""The command line's HTTP client against a real HTTP server that plays a router."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch import client
from launch.demo import Demo, Question, measures, questions
from slipstream.errors import InvalidRequestError, LaunchError, SlipstreamError, UnavailableError

FIRST = {"choices": [{"delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}]}
SECOND = {"choices": [{"delta": {"content": "lo"}, "finish_reason": None}]}
LAST = {"choices": [{"delta": {}, "finish_reason": "stop"}], "slipstream": {"kv_bytes": 2048, "state_bytes": 3 << 20}}


class Router(http.server.ThreadingHTTPServer):
    """Answers every question with the same events."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.events: list[Any] = [FIRST, SECOND, LAST]
        self.ends_properly = True
        self.asked: list[tuple[dict[str, Any], str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        status = self.server.status if self.path == "/health" else 200
        body = {"data": [{"id": "demo"}]} if status == 200 else {"error": {"message": "no decode replica"}}
        self._reply(status, json.dumps(body).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((body, self.headers["x-slipstream-report"]))
        if self.server.status != 200:
            self._reply(self.server.status, json.dumps({"error": {"message": "max_tokens is too large"}}).encode())
            return
        events = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in self.server.events)
        self._reply(200, events + (b"data: [DONE]\n\n" if self.server.ends_properly else b""))

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[Router]:
    with Router() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_streams_and_is_measured(router: Router) -> None:
    answer = client.Answer()
    pieces = list(client.stream_chat(router.url, [client.user_message("hi")], answer, max_tokens=7))
    assert pieces == ["Hel", "lo"]
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert 0 < answer.ttft_seconds <= answer.token_seconds[-1]
    assert measures(answer).endswith("moved 2.0 KiB of KV and 3.00 MiB of state")
    body, report = router.asked[0]
    assert (body["model"], body["stream"], body["max_tokens"], report) == ("demo", True, 7, "1")


def test_a_refusal_is_not_an_answer(router: Router) -> None:
    router.status = 400
    with pytest.raises(SlipstreamError, match="HTTP 400: max_tokens is too large"):
        list(client.stream_chat(router.url, [], client.Answer()))


def test_an_error_inside_the_stream_is_raised(router: Router) -> None:
    router.events = [FIRST, {"error": {"message": "the decode replica was lost"}}]
    answer = client.Answer()
    with pytest.raises(SlipstreamError, match="the decode replica was lost"):
        list(client.stream_chat(router.url, [], answer))
    assert answer.text == "Hel"


def test_a_stream_without_an_end_is_no_success(router: Router) -> None:
    router.events, router.ends_properly = [FIRST], False
    with pytest.raises(UnavailableError, match="broke off"):
        list(client.stream_chat(router.url, [], client.Answer()))


def test_health_says_why_not(router: Router) -> None:
    assert client.health(router.url) == ""
    router.status = 503
    assert client.health(router.url) == "HTTP 503: no decode replica"


def test_nobody_listens() -> None:
    with socket.socket() as taken:  # bound and not listening: connecting to it is refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"nothing answers at {url} .*slipstream serve.*--url"):
            client.get(url, "/status")


def test_pictures_travel_as_data_urls(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    picture, text = client.user_message("what?", [tmp_path / "a.png"])["content"]
    assert picture["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    assert text == {"type": "text", "text": "what?"}
    with pytest.raises(InvalidRequestError, match=r"a\.txt: pictures end in \.png"):
        client.user_message("", [tmp_path / "a.txt"])
    with pytest.raises(InvalidRequestError, match=r"cannot read .*b\.png: No such file"):
        client.user_message("", [tmp_path / "b.png"])


def test_the_demo_asks_of_a_picture_of_a_list_and_for_numbers() -> None:
    picture, facts, numbers = questions()
    assert picture.image is not None
    assert picture.image.read_bytes().startswith(b"\x89PNG")
    assert f"={facts.answer}," in facts.text
    first, last = (int(word.strip(".")) for word in numbers.text.split() if word.strip(".").isdigit())
    assert numbers.answer == ", ".join(map(str, range(first, last + 1))) + "."


async def test_the_demo_fails_when_an_answer_is_wrong(router: Router) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert await Demo(console, questions()).run((router.url,), asyncio.Event()) == 1
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("answered  Hello\n") == 3
    assert "wrong     the right answer is paint" in printed
    assert "0 of 3 answers are right" in printed


async def test_a_model_with_words_of_its_own_has_to_say_what_is_right(router: Router) -> None:
    """The router answers Hello."""
    for said, status in (("ell", 0), ("Paris", 1)):
        console = Console(file=io.StringIO(), width=200)
        asked = [Question(title="A title", text="A question?", says=said)]
        assert await Demo(console, asked).run((router.url,), asyncio.Event()) == status
        assert ("the right answer says Paris" in console.file.getvalue()) == bool(status)  # type: ignore[attr-defined]
    assert all(question.says and not question.answer for question in questions("smollm2"))


async def test_the_demo_fails_when_a_request_is_refused(router: Router) -> None:
    router.status = 429
    console = Console(file=io.StringIO(), width=200)
    assert await Demo(console, questions()).run((router.url,), asyncio.Event()) == 1
    assert "failed    HTTP 429" in console.file.getvalue()  # type: ignore[attr-defined]
