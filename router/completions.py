"""What a request's text looks like to clients of OpenAI's chat and text completions. Knows no HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.answer import Part
from router.reader import Piece, Reader
from router.reasoning import Content, Reasoning
from router.record import report
from router.stream import DONE, error_body, event
from router.tools import Arguments, Call
from slipstream.errors import SlipstreamError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The objects of one endpoint."""

    id: str
    model: str
    created: int
    chat: bool

    def chunk(self, choice: int, delta: Mapping[str, Any], finish_reason: str | None, *, first: bool = False,
              usage: bool = False, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One streamed object. `usage`: the client asked for usage, so every chunk carries the field."""
        body: dict[str, Any] = {"index": choice, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.chat:
            body["delta"] = {"role": "assistant", "content": "", **delta} if first else delta
        else:
            body["text"] = delta.get("content", "")
        return {**self._head(streamed=True), "choices": [body], **({"usage": None} if usage else {})}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The trailing chunk: no choices."""
        return {**self._head(streamed=True), "choices": [], "usage": usage}

    def whole(self, choices: Sequence[tuple[dict[str, Any], str, dict[str, Any] | None]],
              usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that was not streamed: (message, finish reason, logprobs) of each choice."""
        bodies: list[dict[str, Any]] = []
        for index, (message, finish_reason, logprobs) in enumerate(choices):
            body: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
            if self.chat:
                body["message"] = {"role": "assistant", "refusal": None, **message}
            else:
                body["text"] = message["content"]
            bodies.append(body)
        return {**self._head(streamed=False), "choices": bodies, "usage": usage}

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion" + (".chunk" if streamed else "")) if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Completion:
    """One request as its client sees it."""

    def __init__(self, shape: Shape, *, wants_report: bool) -> None:
        self._shape = shape
        self._wants_report = wants_report
        self._begun: set[int] = set()

    def begin(self, reader: Reader) -> Iterator[bytes]:
        """Events before the first text: none."""
        return iter(())

    def news(self, reader: Reader, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Events of what is new."""
        usage, shape = reader.ticket.options.include_usage, self._shape
        for piece in pieces:
            logprobs = reader.logprobs(piece.entries, chat=shape.chat, first=piece.choice not in self._begun)
            deltas = list(map(_delta, piece.parts))
            if not shape.chat:
                text = piece.text if piece.choice in self._begun else reader.ticket.echo + piece.text
                deltas = [{"content": text}] if text else []
            if not deltas and (piece.entries or piece.choice not in self._begun):
                deltas = [{}]
            for delta in deltas:
                yield event(shape.chunk(piece.choice, delta, None, first=piece.choice not in self._begun, usage=usage,
                                        logprobs=logprobs))
                self._begun.add(piece.choice)
                logprobs = None
            if piece.reason is not None:
                last = shape.chunk(piece.choice, {}, piece.reason, usage=usage)
                if self._wants_report and reader.over and piece is pieces[-1]:
                    last["slipstream"] = report(reader.ticket.generation)
                yield event(last)

    def end(self, reader: Reader) -> Iterator[bytes]:
        """Events after the last text."""
        if reader.ticket.options.include_usage:
            yield event(self._shape.usage_chunk(reader.usage()))
        yield DONE

    def failure(self, error: SlipstreamError) -> Iterator[bytes]:
        """Events that end a stream that broke."""
        yield event(error_body(error))

    def whole(self, reader: Reader, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The answer to a request that was not streamed; `pieces`: all, of each choice."""
        chat, echo = self._shape.chat, reader.ticket.echo
        messages = [message([part for piece in of for part in piece.parts]) if chat
                    else {"content": echo + "".join(piece.text for piece in of)} for of in pieces]
        logprobs = [reader.logprobs([entry for piece in of for entry in piece.entries], chat=chat, first=True) for of in pieces]
        choices = [(told, of[-1].reason or "stop", some) for told, of, some in zip(messages, pieces, logprobs, strict=True)]
        body = self._shape.whole(choices, reader.usage())
        scores = reader.prompt_logprobs()
        for one in [body] if chat else body["choices"]:  # where vLLM has them
            one |= scores
        return {**body, "slipstream": report(reader.ticket.generation)} if self._wants_report else body


def new_call_id() -> str:
    """By which a tool's result names its call."""
    return f"call_{secrets.token_hex(12)}"


def message(parts: Sequence[Part]) -> dict[str, Any]:
    """A whole answer: `content`, and `reasoning_content` and `tool_calls` if there are any."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    written: dict[int, list[str]] = {part.index: [] for part in parts if isinstance(part, Call)}
    for part in parts:
        if isinstance(part, Arguments):
            written[part.index].append(part.text)
    functions = [{"name": part.name, "arguments": "".join(written[part.index])} for part in parts if isinstance(part, Call)]
    calls = [{"id": new_call_id(), "type": "function", "function": function} for function in functions]
    return {"content": content if content or not calls else None, **({"reasoning_content": thought} if thought else {}),
            **({"tool_calls": calls} if calls else {})}


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Reasoning():
            return {"reasoning_content": part.text}
        case Content():
            return {"content": part.text}
        case Call():
            return {"tool_calls": [{"index": part.index, "id": new_call_id(), "type": "function",
                                    "function": {"name": part.name, "arguments": ""}}]}
        case Arguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
