"""Reads one request's tokens as text, choice by choice. Knows no HTTP.

A choice ends with its last token or with a stop string; the last choice only ends when it is known how all of them went, so
that usage and report are complete then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from router import logprobs
from router.answer import Part
from router.dispatch import Tokens
from router.logprobs import Entry
from router.service import RouterService, Ticket
from router.stream import usage
from slipstream.types import Logprobs, Role


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is new of one choice."""

    choice: int
    text: str
    reason: str | None = None
    """Why the choice ends with it."""
    entries: Sequence[Entry] = ()
    """Logprobs of the tokens that the text begins."""
    parts: Sequence[Part] = ()
    """What the text means, in a chat; some of it may come with a later text."""


class Reader:
    """A ticket's text, piece by piece; gives the ticket back exactly once."""

    def __init__(self, service: RouterService, ticket: Ticket) -> None:
        self.ticket = ticket
        self._service = service
        self._tokenizer = service.builder.tokenizer
        self._closed = False
        self._echoed: Sequence[Entry] | None = None
        self._open = set(range(len(ticket.texts)))
        self.reasons: dict[int, str] = {}
        """Why each choice that is over ended."""

    @property
    def over(self) -> bool:
        """True once every choice has ended."""
        return not self._open

    async def next(self) -> list[Piece]:
        """Wait for something to show. Raises what ended the request badly."""
        output, pieces = await self.ticket.generation.next(), list[Piece]()
        nothing = self.ticket.options.max_tokens == 0  # the token that ends the prompt's computation is not wanted
        for news in output.news:
            if news.choice not in self._open:
                continue
            if nothing:
                pieces += [] if isinstance(news, Tokens) else [self._last(news.choice, "", "length")]
            elif isinstance(news, Tokens):
                pieces += self._add(news.choice, news.tokens, news.logprobs)
            else:
                pieces.append(self._last(news.choice, self.ticket.texts[news.choice].finish(), news.reason.value))
        end = output.end
        if self.over:
            while end is None:
                end = (await self.ticket.generation.next()).end
        elif end is not None and end.error is not None and not pieces:
            raise end.error  # what came before the failure was shown first
        return pieces

    def _add(self, choice: int, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> list[Piece]:
        text, answer = self.ticket.texts[choice], self.ticket.answers[choice] if self.ticket.answers else None
        if answer is not None and answer.single and len(tokens) > 1:  # what comes after its call is not counted
            pieces: list[Piece] = []
            for number in range(len(tokens)):
                if choice in self._open:
                    pieces += self._add(choice, tokens[number : number + 1], logprobs[number : number + 1])
            return pieces
        if answer is not None:
            answer.count(tokens)
        shown = text.add(tokens, logprobs)
        parts = answer.add(shown) if answer is not None and shown else ()
        if text.stopped or (answer is not None and answer.full):
            self.ticket.generation.enough(choice)
            return [self._last(choice, shown, "stop", parts)]
        entries = text.entries(over=False)
        return [Piece(choice=choice, text=shown, entries=entries, parts=parts)] if shown or entries else []

    def _last(self, choice: int, shown: str, reason: str, parts: Sequence[Part] | None = None) -> Piece:
        """`parts`: those of `shown`, where they are known already."""
        text, answer = self.ticket.texts[choice], self.ticket.answers[choice] if self.ticket.answers else None
        self._open.discard(choice)
        if answer is not None:
            parts = [*(parts or ()), *answer.add(shown if parts is None else "", final=True)]
        reason = "stop" if text.stopped else reason
        if answer is not None and answer.called and reason == "stop":
            reason = "tool_calls"
        self.reasons[choice] = reason
        return Piece(choice=choice, text=shown, reason=reason, entries=text.entries(over=True), parts=parts or ())

    def logprobs(self, entries: Sequence[Entry], *, chat: bool, first: bool) -> dict[str, Any] | None:
        """As the client sees them; None if it does not want any. `first`: these are the first of their choice, so that those of
        an echoed prompt go before them."""
        if self.ticket.generation.request.sampling.logprobs is None:
            return None
        if chat:
            return logprobs.chat(self._tokenizer, entries)
        shift = len(self.ticket.echo)
        shifted = [replace(entry, offset=shift + entry.offset) for entry in entries] if shift else entries
        return logprobs.text(self._tokenizer, [*self.echoed(), *shifted] if first else shifted)

    def echoed(self) -> Sequence[Entry]:
        """Of an echoed prompt's tokens, after the first piece; none if they are not wanted. The first call may take long."""
        generation, top = self.ticket.generation, self.ticket.options.echo_logprobs
        if self._echoed is None:
            told = generation.prompt_logprobs if top is not None else None
            self._echoed = () if top is None or told is None else logprobs.echoed(
                self._tokenizer, generation.request.prompt.tokens, told, top)
        return self._echoed

    def prompt_logprobs(self) -> dict[str, Any]:
        """The field of that name, of an answer that is over, if it is wanted."""
        generation, top = self.ticket.generation, self.ticket.options.prompt_logprobs
        if top is None or generation.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": logprobs.of_prompt(self._tokenizer, generation.request.prompt.tokens,
                                                      generation.prompt_logprobs, top)}

    def usage(self) -> dict[str, Any]:
        """So far; the prompt counts once, whatever the number of choices and resumes."""
        stats, prompt = self.ticket.generation.dispatch.stats, self.ticket.prompt_tokens
        told = stats.get(Role.PREFILL) or stats.get(Role.DECODE)  # decode has heard it in the hand-off
        cached = min(told.cached_tokens, prompt) if told else 0
        told_of = zip(self.ticket.answers, self.ticket.texts, strict=False)
        thought = [min(answer.reasoning_tokens, text.tokens) for answer, text in told_of if answer.reasoning_tokens is not None]
        return usage(prompt, sum(text.tokens for text in self.ticket.texts), cached, sum(thought) if thought else None)

    def close(self) -> None:
        """Cancels what still runs."""
        if not self._closed:
            self._closed = True
            self._service.end(self.ticket)
