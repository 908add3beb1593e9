"""A small client of the OpenAI API that a router serves, for the command line and the demo. Knows nothing of workers."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidRequestError, LaunchError, SlipstreamError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


@dataclass
class Answer:
    """What became of one streamed request; complete once the stream was read to its end."""

    text: str = ""
    finish_reason: str = ""
    token_seconds: list[float] = field(default_factory=list)
    """When each piece of text came, counted from the request."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The router's own account of the request, where it was asked for."""

    @property
    def ttft_seconds(self) -> float:
        """Time to the first piece of text."""
        return self.token_seconds[0] if self.token_seconds else 0.0

    @property
    def itl_seconds(self) -> float:
        """Mean time between pieces of text after the first."""
        times = self.token_seconds
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def get(url: str, path: str, timeout_seconds: float = 10.0, *, key: str = "") -> Any:
    """The JSON body of a GET. `key`: for a router that wants one.

    Raises LaunchError when nothing listens, SlipstreamError for any other refusal.
    """
    with _open(urllib.request.Request(_base(url) + path, headers=_authorization(key)), timeout_seconds) as response:
        return json.load(response)


def health(url: str) -> str:
    """Empty when the router takes requests, otherwise why not."""
    try:
        with _open(urllib.request.Request(_base(url) + "/health"), 5.0):
            return ""
    except SlipstreamError as error:
        return str(error)


def user_message(text: str, images: Sequence[Path] = ()) -> dict[str, Any]:
    """A chat message; pictures come first, as data URLs. Raises InvalidRequestError for a file that cannot be read."""
    parts: list[dict[str, Any]] = []
    for path in images:
        kind = MEDIA_TYPES.get(path.suffix.lower())
        if kind is None:
            raise InvalidRequestError(f"{path}: pictures end in {', '.join(MEDIA_TYPES)}")
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error
        parts.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def stream_chat(url: str, messages: Sequence[Mapping[str, Any]], answer: Answer, *, max_tokens: int = 512,
                temperature: float = 0.0, timeout_seconds: float = 120.0, key: str = "") -> Iterator[str]:
    """Ask, and yield the answer's text piece by piece; `answer` is filled on the way.

    Raises SlipstreamError when the router refuses, and when the stream breaks off.
    """
    model = get(url, "/v1/models", key=key)["data"][0]["id"]
    body = {"model": model, "messages": list(messages), "stream": True, "max_tokens": max_tokens, "temperature": temperature}
    request = urllib.request.Request(_base(url) + "/v1/chat/completions", data=json.dumps(body).encode(), method="POST",
                                     headers={"content-type": "application/json", "x-slipstream-report": "1",
                                              **_authorization(key)})
    started = time.monotonic()
    with _open(request, timeout_seconds) as response:
        for chunk in _events(response):
            if "error" in chunk:
                raise SlipstreamError(str(chunk["error"].get("message", chunk["error"])))
            answer.report = chunk.get("slipstream") or answer.report
            for choice in chunk.get("choices", ()):
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                if piece := choice.get("delta", {}).get("content"):
                    answer.token_seconds.append(time.monotonic() - started)
                    answer.text += piece
                    yield piece
    if not answer.finish_reason:
        raise UnavailableError("the answer broke off: the stream ended without a finish reason")


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON payloads of a server-sent event stream, up to `[DONE]`."""
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"the answer broke off: {error}") from error


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _base(url: str) -> str:
    """Where the router listens, from what people type: with or without http://, with or without the /v1 of OpenAI clients."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def _open(request: urllib.request.Request, timeout_seconds: float) -> HTTPResponse:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy of the environment
    try:
        response: HTTPResponse = opener.open(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        raise _refusal(error) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        base = request.full_url.split("/", 3)
        raise LaunchError(f"nothing answers at {'/'.join(base[:3])} ({reason}); start a deployment with `slipstream serve`, "
                          "or name another one with --url") from error
    return response


def _refusal(error: urllib.error.HTTPError) -> SlipstreamError:
    body = error.read().decode(errors="replace")
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.strip() or error.reason
    hint = "; name it with --api-key or SLIPSTREAM_API_KEY" if error.code == HTTPStatus.UNAUTHORIZED else ""
    return SlipstreamError(f"HTTP {error.code}: {message}{hint}")
