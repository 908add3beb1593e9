"""Tokens to text, stop strings, server-sent events. Knows no worker.

[DONE] ends a stream that ended well, and only that: a stream that broke ends with one `error` event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from router.logprobs import Entry
from slipstream.errors import SlipstreamError
from slipstream.text.tokenizer import Detokenizer, Tokenizer
from slipstream.types import Logprobs

DONE = b"data: [DONE]\n\n"
_json = msgspec.json.Encoder()


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _json.encode(payload) + b"\n\n"


def error_body(error: SlipstreamError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.openai_type, "param": error.field, "code": error.code}}


class StopFilter:
    """Holds back the end of the text while it could still become a stop string, and no longer.

    The stop string that is complete first ends the text, however the text is cut into pieces; of two that are complete at the
    same character the longer one. The work per character does not depend on the stop strings' lengths (Knuth-Morris-Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop string that the end of the text holds
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What may be shown now; after a stop string nothing more."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        before = len(self._held)
        text = self._held + text
        for position in range(before, len(text)):
            if complete := self._advance(text[position]):
                self.stopped, self._held = True, ""
                return text[: position + 1 - complete]
        keep = max(self._matched)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _advance(self, letter: str) -> int:
        """Take one character; the length of the longest stop string that it completes, or 0."""
        complete = 0
        for number, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[number]
            while matched and stop[matched] != letter:
                matched = borders[matched - 1]
            matched += stop[matched] == letter
            self._matched[number] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete

    def finish(self) -> str:
        """The text ended: what was held back was no stop string."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def _borders(stop: str) -> tuple[int, ...]:
    """For every beginning of `stop`, the length of its longest proper beginning that is also its end."""
    borders = [0] * len(stop)
    matched = 0
    for position in range(1, len(stop)):
        while matched and stop[matched] != stop[position]:
            matched = borders[matched - 1]
        matched += stop[matched] == stop[position]
        borders[position] = matched
    return tuple(borders)


class TextStream:
    """One choice's tokens as text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], hidden: Iterable[int], min_tokens: int = 0) -> None:
        """`hidden`: tokens that end the choice; they are counted and not shown. Stop strings are looked for in the text of
        the tokens after the first `min_tokens`."""
        self._min_tokens = min_tokens
        self._made = self._shown = 0  # characters of the tokens' text, and of them those that were shown
        self._untold: deque[tuple[int, int, Logprobs]] = deque()  # (characters before the token, token, logprobs)
        self._text = Detokenizer(tokenizer)
        self._filter = StopFilter(stops)
        self._hidden = frozenset(hidden)
        self._looks_for_stops = bool(stops)
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self._filter.stopped

    def add(self, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> str:
        """Text to show now. Tokens after a stop string are neither shown nor counted. `logprobs`: none, or one per token."""
        if not self._looks_for_stops and not logprobs:
            self.tokens += len(tokens)
            return self._text.add([token for token in tokens if token not in self._hidden])
        shown = ""
        for number, token in enumerate(tokens):
            if self.stopped:
                break
            self.tokens += 1
            if token in self._hidden:
                continue
            if logprobs:
                self._untold.append((self._made, token, logprobs[number]))
            piece = self._text.add([token])
            self._made += len(piece)
            shown += piece if self.tokens <= self._min_tokens else self._filter.add(piece)
        self._shown += len(shown)
        return shown

    def entries(self, *, over: bool) -> list[Entry]:
        """Logprobs of the tokens that the text shown since the last call begins; at the end also of those without text, but
        of none that a stop string cut off."""
        found: list[Entry] = []
        while self._untold and (self._untold[0][0] < self._shown or (over and not self.stopped)):
            offset, token, logprobs = self._untold.popleft()
            found.append(Entry(offset=offset, token=token, logprobs=logprobs))
        return found

    def finish(self) -> str:
        """Text that was held back until the end."""
        if self.stopped:
            return ""
        rest = self._filter.add(self._text.finish())
        rest += self._filter.finish()
        self._shown += len(rest)
        return rest


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int,
          reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object; cached tokens are prefill's. `reasoning_tokens`: None where the model does not think aloud."""
    details = {} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens, "prompt_tokens_details": {"cached_tokens": cached_tokens},
            **details}
