"""What a request's text looks like to clients of /v1/responses: items, and the events that build them. Knows no HTTP.

Items are told one after the other, each from its `added` to its `done`; what is whole is what the events built.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from router.answer import Part
from router.completions import new_call_id
from router.reader import Piece, Reader
from router.reasoning import Content, Reasoning
from router.record import report
from router.tools import Arguments, Call
from slipstream.errors import SlipstreamError

_json = msgspec.json.Encoder()
_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": {},
    "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
    "top_p": None, "user": None}
"""Fields of the request that the response repeats, and what they are if they are not given."""


class ResponseEvents:
    """One request as its client sees it."""

    def __init__(self, id: str, model: str, created: int, body: Mapping[str, Any], *, wants_report: bool) -> None:
        self._echoed = {name: body[name] if body.get(name) is not None else usual for name, usual in _ECHOED.items()}
        self._head = {"id": id, "object": "response", "created_at": created, "model": model}
        self._wants_report = wants_report
        self._numbers = count()
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while it grows
        self._written: list[str] = []  # its text so far
        self._logprobs: list[dict[str, Any]] = []
        self._untold: list[dict[str, Any]] = []  # logprobs that no delta has carried

    def begin(self, reader: Reader) -> Iterator[bytes]:
        """Events before the first text."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def news(self, reader: Reader, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Events of what is new."""
        for piece in pieces:
            told = reader.logprobs(piece.entries, chat=True, first=False)
            self._untold += told["content"] if told else []
            for part in piece.parts:
                yield from self._grow(part)
            if piece.reason is not None:
                if not self._items:
                    yield from self._grow(Content(""))
                yield from self._close("incomplete" if piece.reason == "length" else "completed")

    def end(self, reader: Reader) -> Iterator[bytes]:
        """The event after the last text."""
        response = self._finished(reader)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: SlipstreamError) -> Iterator[bytes]:
        """Events that end a stream that broke."""
        response = {**self._response("failed"), "error": {"code": error.code, "message": error.message}}
        yield self._event("response.failed", response=response)

    def whole(self, reader: Reader, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The answer to a request that was not streamed."""
        for _ in self.news(reader, pieces[0]):
            pass
        return self._finished(reader)

    # The items ---------------------------------------------------------------------------------------------------------

    def _grow(self, part: Part) -> Iterator[bytes]:
        kind = "reasoning" if isinstance(part, Reasoning) else "message" if isinstance(part, Content) else "function_call"
        if self._open is None or self._open["type"] != kind or isinstance(part, Call):
            yield from self._close("completed")
            yield from self._add(kind, part)
        if isinstance(part, Call):
            return
        self._written.append(part.text)
        if isinstance(part, Content):
            some, self._untold = self._untold, []
            self._logprobs += some
            yield self._of_item("output_text.delta", content_index=0, delta=part.text, logprobs=some)
        elif isinstance(part, Reasoning):
            yield self._of_item("reasoning_text.delta", content_index=0, delta=part.text)
        else:
            yield self._of_item("function_call_arguments.delta", delta=part.text)

    def _add(self, kind: str, part: Part) -> Iterator[bytes]:
        item: dict[str, Any] = {"id": f"{_PREFIX[kind]}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
        if isinstance(part, Call | Arguments):
            item |= {"call_id": new_call_id(), "name": part.name if isinstance(part, Call) else "", "arguments": ""}
        else:
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            item |= {"content": [], **more}
        self._items.append(item)
        self._open, self._written, self._logprobs = item, [], []
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind != "function_call":
            yield self._of_item("content_part.added", content_index=0, part=_part(kind, "", []))

    def _close(self, status: str) -> Iterator[bytes]:
        if (item := self._open) is None:
            return
        kind, text = item["type"], "".join(self._written)
        if kind == "function_call":
            item["arguments"] = text
            yield self._of_item("function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = _part(kind, text, self._logprobs)
            more = {"logprobs": self._logprobs} if kind == "message" else {}
            yield self._of_item("output_text.done" if kind == "message" else "reasoning_text.done", content_index=0, text=text,
                                **more)
            yield self._of_item("content_part.done", content_index=0, part=part)
            item["content"] = [part]
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = None

    # The response ------------------------------------------------------------------------------------------------------

    def _finished(self, reader: Reader) -> dict[str, Any]:
        told = reader.usage()
        usage = {"input_tokens": told["prompt_tokens"], "input_tokens_details": told["prompt_tokens_details"],
                 "output_tokens": told["completion_tokens"], "total_tokens": told["total_tokens"],
                 "output_tokens_details": told.get("completion_tokens_details", {"reasoning_tokens": 0})}
        cut = reader.reasons[0] == "length"
        return {**self._response("incomplete" if cut else "completed"), "usage": usage,
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                **({"slipstream": report(reader.ticket.generation)} if self._wants_report else {})}

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._head, **self._echoed, "status": status, "output": self._items, "error": None, "usage": None,
                "incomplete_details": None, "previous_response_id": None, "store": False, "background": False,
                "truncation": "disabled", "service_tier": "default"}

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(f"response.{kind}", output_index=len(self._items) - 1, item_id=self._items[-1]["id"], **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _json.encode({"type": kind, "sequence_number": next(self._numbers), **fields})
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
