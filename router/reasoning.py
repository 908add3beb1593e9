"""A model's thinking and its answer, told apart at `<think>` and `</think>`. Pure; knows no token.

However the text is cut into pieces, the parts joined are the same. Newlines beside the marks belong to neither part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Reasoning:
    """Some of the thinking."""

    text: str


@dataclass(frozen=True)
class Content:
    """Some of the answer."""

    text: str


def live(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning of a mark, and not the whole of it."""
    for size in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(size < len(mark) and text.endswith(mark[:size]) for mark in marks):
            return size
    return 0


class ThinkSplitter:
    """Thinking is there if the prompt opened it, or the answer begins with `<think>`; it goes on to the first `</think>`."""

    def __init__(self, *, opened: bool) -> None:
        self.thinking: bool | None = True if opened else None
        """None: that is not known yet."""
        self._held = ""
        self._fresh = opened  # nothing has come since a mark, so newlines are dropped

    def add(self, text: str) -> list[Reasoning | Content]:
        """What is known now."""
        text, self._held = self._held + text, ""
        found: list[Reasoning | Content] = []
        if self.thinking is None:
            begins = text.lstrip()
            if OPEN.startswith(begins[: len(OPEN)]) and len(begins) < len(OPEN):
                self._held = text
                return []
            self.thinking = self._fresh = begins.startswith(OPEN)
            text = begins.removeprefix(OPEN) if self.thinking else text
        if self.thinking:
            text = self._stripped(text)
            thought, close, text = text.partition(CLOSE)
            shown = (thought if close else thought[: len(thought) - live(thought, (CLOSE,))]).rstrip("\n")
            if shown:
                found.append(Reasoning(shown))
            if not close:
                self._held = thought[len(shown):]
                return found
            self.thinking, self._fresh = False, True
        if text := self._stripped(text):
            found.append(Content(text))
        return found

    def finish(self) -> list[Reasoning | Content]:
        """The text ended: what was held back was no mark."""
        held, self._held = self._held, ""
        return [Reasoning(held) if self.thinking else Content(held)] if held else []

    def _stripped(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


class ThinkCount:
    """How many of a choice's tokens are thinking, with its marks."""

    def __init__(self, open_token: int | None, close_token: int, *, opened: bool) -> None:
        self.tokens = 0
        self._open_token = open_token
        self._close_token = close_token
        self._thinking: bool | None = True if opened else None

    def add(self, tokens: Sequence[int]) -> None:
        """In the order of the output."""
        for token in tokens:
            if self._thinking is None:
                self._thinking = token == self._open_token
            if not self._thinking:
                return
            self.tokens += 1
            self._thinking = token != self._close_token
