"""Requests of every kind over HTTP, each with one right answer however often it is asked: text, pictures, several choices,
sampled and greedy, penalties, stop strings, log-probabilities; streamed or not."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.samples import FOLDER


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One kind of request."""

    name: str
    path: str
    body: dict[str, Any]
    answer: str = ""
    """The right text, where that is known from the start."""


@dataclass(kw_only=True)
class Choice:
    """What came for one choice."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    """With log-probabilities only."""
    reason: str = ""


@dataclass(kw_only=True)
class Reply:
    """What came for one request; equal for equal answers."""

    choices: list[Choice]
    usage: tuple[int, int] = (0, 0)
    """Prompt and completion tokens."""
    error: str = field(default="", compare=False)
    """A typed error, as its code; the rest is what came before it."""


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A sample's messages as OpenAI spells them."""
    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] != "image":
            return given
        data = base64.b64encode((FOLDER / given["image"]).read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    return [{**message, "content": [part(given) for given in message["content"]]
             if isinstance(message["content"], list) else message["content"]} for message in row["messages"]]


def asks() -> list[Ask]:
    """The sample prompts, long greedy answers, and sampled ones."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    found = []
    for number, line in enumerate((FOLDER / "samples.jsonl").read_text().splitlines()):
        row = json.loads(line)
        more = {"logprobs": True, "top_logprobs": 2} if number % 3 == 0 else {"n": 2} if number % 3 == 1 else {}
        found.append(Ask(name=row["id"], path=chat, answer=row["answer"],
                         body={"messages": messages(row), "temperature": 0, "max_tokens": 200, **more}))
    for number in range(8):
        body = {"prompt": f"{number}: what is in row 2, and what is in row {number}?", "max_tokens": 120 + 30 * number,
                "ignore_eos": True, "temperature": 0, "repetition_penalty": 1.0 + 0.05 * number}
        found.append(Ask(name=f"long-{number}", path=completions, body=body))
    for number in range(12):
        body = {"prompt": list(range(40 + number, 80 + 3 * number)), "max_tokens": 40 + 5 * number, "temperature": 1.2,
                "seed": number, "n": 1 + number % 3, "top_p": 0.98, "presence_penalty": 0.3, "frequency_penalty": 0.2,
                "logprobs": 1}
        found.append(Ask(name=f"sampled-{number}", path=completions, body=body))
    return found


async def send(client: httpx.AsyncClient, ask: Ask, *, stream: bool, leave_after: int = 0, model: str = "demo") -> Reply:
    """The reply, also one that is cut by a typed error; raises httpx.TransportError if the connection is lost.

    `leave_after`: go away after so many pieces of a stream.
    """
    body = {"model": model, **ask.body}
    if not stream:
        answer = await client.post(ask.path, json=body)
        told = answer.json()
        return _whole(told) if answer.status_code == 200 else Reply(choices=[], error=_code(told))
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = Reply(choices=[Choice() for _ in range(ask.body.get("n", 1))])
    async with client.stream("POST", ask.path, json=body) as answer:
        if answer.status_code != 200:
            return Reply(choices=[], error=_code(json.loads(await answer.aread())))
        pieces = 0
        async for event in _events(answer):
            if "error" in event:
                reply.error = _code(event)
                return reply
            _add(reply, event)
            pieces += 1
            if pieces == leave_after:
                return reply
    return reply


async def until_healthy(client: httpx.AsyncClient, seconds: float) -> None:
    """Wait until the router says that it takes requests."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


def _code(told: dict[str, Any]) -> str:
    error = told["error"]
    return f"{error['code']}: {error['message']}"


def _whole(told: dict[str, Any]) -> Reply:
    usage = told["usage"]
    reply = Reply(choices=[Choice() for _ in told["choices"]], usage=(usage["prompt_tokens"], usage["completion_tokens"]))
    for given in told["choices"]:
        _take(reply.choices[given["index"]], given, given.get("message"))
    return reply


def _add(reply: Reply, event: dict[str, Any]) -> None:
    for given in event["choices"]:
        _take(reply.choices[given["index"]], given, given.get("delta"))
    if usage := event.get("usage"):
        reply.usage = (usage["prompt_tokens"], usage["completion_tokens"])


def _take(choice: Choice, given: dict[str, Any], message: dict[str, Any] | None) -> None:
    choice.text += (given["text"] if message is None else message.get("content")) or ""
    if told := given.get("logprobs"):
        choice.tokens += told["tokens"] if message is None else [one["token"] for one in told["content"]]
    if given.get("finish_reason"):
        assert not choice.reason, "a choice ended twice"
        choice.reason = given["finish_reason"]


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The stream's JSON events; fails unless it ends with [DONE] or an error."""
    failed = False
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line[6:])
            failed |= "error" in event
            yield event
    assert failed, "a stream ended without an end"
