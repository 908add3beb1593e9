"""Logprobs as OpenAI shows them, for chat and for text completions. Knows no stream and no worker.

A logprob below FLOOR, minus infinity too, is shown as FLOOR: JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Logprobs

FLOOR = -9999.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One token of the text."""

    offset: int
    """Characters of the output before it."""
    token: int
    logprobs: Logprobs


def chat(tokenizer: Tokenizer, entries: Sequence[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, FLOOR), "bytes": list(raw)}

    return {"content": [{**one(entry.token, entry.logprobs.logprob), "top_logprobs": [one(*top) for top in entry.logprobs.top]}
                        for entry in entries], "refusal": None}


def text(tokenizer: Tokenizer, entries: Sequence[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; the drawn token is among the top ones even if it is not that probable."""
    own = [max(entry.logprobs.logprob, FLOOR) for entry in entries]
    names = [tokenizer.word(entry.token) for entry in entries]
    top = [{**{tokenizer.word(token): max(logprob, FLOOR) for token, logprob in reversed(entry.logprobs.top)}, names[i]: own[i]}
           for i, entry in enumerate(entries)]
    return {"tokens": names, "token_logprobs": own, "top_logprobs": top, "text_offset": [entry.offset for entry in entries]}
