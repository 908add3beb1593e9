"""Logprobs as OpenAI shows them, for chat and for text completions, and those of prompts, as vLLM does too. Knows no stream and
no worker.

A logprob below FLOOR, minus infinity too, is shown as FLOOR: JSON has no infinity.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Logprobs, PromptLogprobs

FLOOR = -9999.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One token of the text."""

    offset: int
    """Characters of the text before it."""
    token: int
    logprobs: Logprobs | None
    """None: of a prompt's first token, before which there is nothing."""


def chat(tokenizer: Tokenizer, entries: Sequence[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion, which never shows a prompt."""
    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, FLOOR), "bytes": list(raw)}

    return {"content": [{**one(entry.token, told.logprob), "top_logprobs": [one(*top) for top in told.top]}
                        for entry in entries if (told := entry.logprobs) is not None], "refusal": None}


def text(tokenizer: Tokenizer, entries: Sequence[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; the drawn token is among the top ones even if it is not that probable."""
    names = [tokenizer.word(entry.token) for entry in entries]
    own = [None if entry.logprobs is None else max(entry.logprobs.logprob, FLOOR) for entry in entries]
    top = [None if entry.logprobs is None else
           {**{tokenizer.word(token): max(logprob, FLOOR) for token, logprob in reversed(entry.logprobs.top)}, name: logprob}
           for entry, name, logprob in zip(entries, names, own, strict=True)]
    return {"tokens": names, "token_logprobs": own, "top_logprobs": top, "text_offset": [entry.offset for entry in entries]}


def echoed(tokenizer: Tokenizer, tokens: Sequence[int], told: PromptLogprobs, top: int) -> list[Entry]:
    """A prompt's tokens, for `text`. `told` may hold more than `top` of the most probable ones."""
    entries: list[Entry] = []
    decoder, offset = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for number, token in enumerate(tokens):
        row = told.row(number - 1) if number else None
        entries.append(Entry(offset=offset, token=token,
                             logprobs=row and Logprobs(logprob=row.logprob, top=row.top[:top])))
        offset += len(decoder.decode(tokenizer.token_bytes(token)))
    return entries


def of_prompt(tokenizer: Tokenizer, tokens: Sequence[int], told: PromptLogprobs, top: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM has them: of each token its own and the most probable ones by id; of the first nothing."""
    shown: list[dict[str, Any] | None] = [None]
    for number, token in enumerate(tokens[1:]):
        row = told.row(number)
        found = {token: (row.logprob, told.ranks[number])}
        for rank, (other, logprob) in enumerate(row.top[:top], 1):
            found.setdefault(other, (logprob, rank))
        shown.append({str(id): {"logprob": max(logprob, FLOOR), "rank": rank,
                                "decoded_token": tokenizer.token_bytes(id).decode(errors="replace")}
                      for id, (logprob, rank) in found.items()})
    return shown
