"""One choice's text as the parts of a chat answer: thinking, content, calls. Pure; knows no token's text and no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from router.functions import Tools
from router.reasoning import Content, Reasoning, ThinkCount, ThinkSplitter
from router.tools import Event, ToolParser

Part = Reasoning | Event


class Answer:
    """Takes what a choice shows, says what it means."""

    def __init__(self, tools: Tools, splitter: ThinkSplitter | None, count: ThinkCount | None) -> None:
        """`splitter`: None where the model does not think aloud; `count`: None where its marks are no tokens."""
        self._splitter = splitter
        self._count = count
        self._parser = ToolParser(tools.schemas, single=tools.single) if tools.shown else None
        self.single = tools.single
        """What is made after the first call is not wanted."""

    @property
    def called(self) -> bool:
        """It holds a call."""
        return self._parser is not None and self._parser.calls > 0

    @property
    def full(self) -> bool:
        """It has all that is wanted."""
        return self._parser is not None and self._parser.full

    @property
    def reasoning_tokens(self) -> int | None:
        """None: not known."""
        return None if self._count is None else self._count.tokens

    def count(self, tokens: Sequence[int]) -> None:
        """The tokens of the choice, in order."""
        if self._count is not None:
            self._count.add(tokens)

    def add(self, text: str, *, final: bool = False) -> list[Part]:
        """What the text adds; `final`: it is the last."""
        split: list[Reasoning | Content] = [Content(text)] if text else []
        if self._splitter is not None:
            split = [*self._splitter.add(text), *(self._splitter.finish() if final else ())]
        if self._parser is None:
            return list(split)
        parts: list[Part] = []
        for part in split:
            parts += self._parser.add(part.text) if isinstance(part, Content) else [part]
        return [*parts, *(self._parser.finish() if final else ())]
