"""A real router process in front of scripted workers, and short ways to ask it."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from launch.child import ChildProcess
from slipstream import checkpoint
from slipstream.checkpoint import DEMO
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Role
from tests.support.fake_workers import FakeWorker, Plan, Seen
from tests.support.scripted_workers import Stage

MODEL = "demo_model"
CHECKPOINT = checkpoint.read(DEMO)
CONTEXT = CHECKPOINT.max_context
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EOS = 1913
SECRET = "SECRETWORD"
"""Part of what tests send, to be found nowhere else."""
MESSAGES = [{"role": "user", "content": SECRET}]
REFUSING = ("router.max_body_bytes=2000000", "router.max_images=3")
"""Limits of a router that is sent more than it takes."""


@dataclass(kw_only=True)
class Streamed:
    """A streamed answer, as it came."""

    status: int
    headers: httpx.Headers
    events: list[Any] = field(default_factory=list)
    """Parsed; `[DONE]` as that string."""
    body: bytes = b""
    """Of a refusal."""

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [one for one in self.events if isinstance(one, dict) and "choices" in one]

    @property
    def text(self) -> str:
        pieces = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(piece["text"] if "text" in piece else piece["delta"].get("content") or "" for piece in pieces)

    @property
    def reasons(self) -> list[str]:
        return [choice["finish_reason"] for chunk in self.chunks for choice in chunk["choices"] if choice["finish_reason"]]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [one["error"] for one in self.events if isinstance(one, dict) and "error" in one]


class Front:
    """One router and the workers behind it."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage = stage
        self.tokenizer = Tokenizer(DEMO)
        self._folder = folder
        self._started: list[ChildProcess] = []
        self.workers: dict[Role, FakeWorker] = {}
        self.url = ""
        self.grpc = ""
        """Of the same router."""
        self.model = MODEL

    def start(self, workers: Sequence[str], *overrides: str, directory: str = "", dns: str = "") -> ChildProcess:
        """A router process; `url` is its."""
        command = [sys.executable, "-m", "router", "--exit-with-parent", "--log-level", "info"]
        for override in ("router.port=0", f"model.served_name={self.model}", *overrides):
            command += ["--set", override]
        for address in workers:
            command += ["--worker", address]
        if directory:
            command += ["--directory", directory]
        if dns:
            command += ["--worker-dns", dns]
        name = f"router-{len(self._started)}"
        child = ChildProcess(name, command, {**os.environ, "OMP_NUM_THREADS": "1"}, self._folder / f"{name}.log")
        self._started.append(child)
        line = child.ready(30.0)
        self.url, self.grpc = f"http://{line['http']}", line["grpc"]
        return child

    def until_healthy(self, status: int = 200, seconds: float = 10.0) -> dict[str, Any]:
        with self.client() as client:
            last: list[httpx.Response] = []

            def healthy() -> bool:
                last[:] = [client.get("/health")]
                return last[0].status_code == status

            self.stage.until(healthy, f"/health {status}", seconds)
            result: dict[str, Any] = last[0].json()
            return result

    def until_idle(self, seconds: float = 3.0) -> None:
        with self.client() as client:
            self.stage.until(lambda: client.get("/status").json()["in_flight"] == 0, "nothing in flight", seconds)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20.0, trust_env=False, verify=False)  # no TLS: contexts are slow to make

    def close(self) -> list[int]:
        return [child.stop(10.0) for child in self._started]

    def log(self) -> list[dict[str, Any]]:
        """JSON lines of the latest router."""
        lines = self._started[-1].log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def complaints(self) -> list[str]:
        return [line["message"] for line in self.log() if line["level"] in ("error", "critical")]

    # Asking --------------------------------------------------------------------------------------------------------------

    def answer(self, text: str, *, stop: bool = True, **plan: Any) -> tuple[int, ...]:
        """The next request is answered with this text; its tokens."""
        tokens = (*self.tokenizer.encode(text), *([EOS] if stop else []))
        self.stage.next(Plan(tokens=tokens, **plan))
        return tokens

    def chat(self, content: Any = "hello", *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        with self.client() as client:
            return client.post("/v1/chat/completions", json=body, headers=headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.client() as client:
            return client.post(path, content=content, headers={"content-type": "application/json", **(headers or {})})

    @contextmanager
    def open(
        self, path: str = "/v1/chat/completions", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> Iterator[httpx.Response]:
        """A streamed request whose body is not read yet."""
        body = {"model": MODEL, "stream": True, **fields}
        if path.endswith("chat/completions"):
            body.setdefault("messages", [{"role": "user", "content": "hello"}])
        with self.client() as client, client.stream("POST", path, json=body, headers=headers) as response:
            yield response

    def stream(self, path: str = "/v1/chat/completions", *, headers: dict[str, str] | None = None, **fields: Any) -> Streamed:
        with self.open(path, headers=headers, **fields) as response:
            result = Streamed(status=response.status_code, headers=response.headers)
            if response.headers["content-type"].startswith("application/json"):
                result.body = response.read()
                return result
            result.events = list(events(response))
            return result

    @property
    def prompt(self) -> str:
        """What the workers were last asked to compute, special tokens by their names."""
        return self.tokenizer.words(self.stage.last.submits[Role.PREFILL][0].tokens)

    def held(self, count: int = 1) -> Seen:
        """Wait until the workers hold request number `count` from the end."""
        def held() -> bool:
            return bool(self.stage.seen) and self.stage.last.held.is_set() and not self.stage.last.released.is_set()

        self.stage.until(held, "the request is held")
        return self.stage.last


def events(response: httpx.Response) -> Iterator[Any]:
    """Server-sent events; raises AssertionError for anything else in the body."""
    for line in response.iter_lines():
        if not line:
            continue
        assert line.startswith("data: "), line
        yield line[6:] if line[6:] == "[DONE]" else json.loads(line[6:])


def ask_raw(router: Front, body: dict[str, Any]) -> socket.socket:
    """A raw connection that has asked."""
    host, port = router.url.removeprefix("http://").split(":")
    data = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], **body}).encode()
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return connection


class Later:
    """A call in a thread."""

    def __init__(self, fn: Any, *arguments: Any, **named: Any) -> None:
        self._result: list[Any] = []
        self._error: list[BaseException] = []

        def run() -> None:
            try:
                self._result.append(fn(*arguments, **named))
            except BaseException as error:
                self._error.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self, seconds: float = 15.0) -> Any:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "still running"
        if self._error:
            raise self._error[0]
        return self._result[0]


def picture(height: int, width: int, colour: int = 0) -> dict[str, Any]:
    """A part of a message."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@contextmanager
def front(folder: Path, *overrides: str, model: str = MODEL, complaints: Sequence[str] | None = ()) -> Iterator[Front]:
    """A router with one prefill and one decode worker, healthy. `complaints`: what its log may say, at least as errors; None:
    anything."""
    stage = Stage()
    one = Front(stage, folder)
    one.model = model
    try:
        one.workers = {role: stage.worker(role, model_name=model) for role in Role}
        one.start([worker.address for worker in one.workers.values()], *overrides)
        one.until_healthy()
        yield one
        assert complaints is None or one.complaints() == list(complaints)
    finally:
        codes = one.close()
        stage.close()
    assert set(codes) <= {0, 2}, codes


def refused(reply: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The error object of a refusal, which is of OpenAI's form, small, and quotes nothing."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert len(reply.content) < 2048
    assert SECRET not in reply.text
    assert set(reply.json()) == {"error"}
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    return error


@contextmanager
def no_worker_hears(router: Front) -> Iterator[None]:
    """Nothing that is sent inside reaches a worker, and the next request works."""
    before = {role: len(worker.submits) for role, worker in router.workers.items()}
    yield
    assert {role: len(worker.submits) for role, worker in router.workers.items()} == before
    router.answer("fine")
    assert router.chat().status_code == 200
