"""Structured output: which tokens a text of a given form may go on with. A thin layer over llguidance; knows no request.

A model that thinks first does so freely: until its `</think>` every token is allowed but those that would end the answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from slipstream.errors import InternalError, InvalidRequestError
from slipstream.types import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

KEPT = 64
"""Compiled grammars that are kept."""
_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \t\r\n]{1,32}"}
"""At most so much white space in one place: a model that likes it would go on for ever."""


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any]) -> str:
    """A text that a JSON schema describes. An empty schema is any object: of a bare value, such as a number, nobody would know
    where it ends."""
    return LLMatcher.grammar_from_json_schema(dict(schema) or {"type": "object"}, overrides=_OPTIONS)


class Grammars:
    """Compiles for one checkpoint. Thread-safe."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Reads the folder's tokenizer.json when the first grammar comes; that takes a second for a large vocabulary."""
        self._folder, self._vocab_size, self._eos = folder, vocab_size, sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of its text. Raises InvalidRequestError for a grammar that cannot be compiled.

        Nothing bounds the time that takes; a router checks what users send before (`router.schemas`).
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(str(self._folder / "tokenizer.json"), n_vocab=self._vocab_size,
                                              eos_token=self._eos)
            found = self._kept.pop(grammar.text, None) or _compile(self._tokenizer, grammar.text)
            self._kept[grammar.text] = found
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return Matcher(found.deep_copy(), grammar, self._vocab_size, self._eos)


def _compile(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    try:
        found = LLMatcher(tokenizer, text, log_level=0)
        found.compute_bitmask()
        error = found.get_error()
    except BaseException as panic:  # llguidance's own, which is no Exception
        if isinstance(panic, KeyboardInterrupt | SystemExit):
            raise
        error = "it is too complex"
    if error:
        raise InvalidRequestError(f"the form of the answer cannot be used: {error.strip().splitlines()[0][:300]}",
                                  field="response_format")
    return found


class Matcher:
    """How far one choice's text is."""

    def __init__(self, inner: LLMatcher, grammar: Grammar, vocab_size: int, eos: Collection[int]) -> None:
        self._inner, self._grammar, self._vocab_size, self._eos = inner, grammar, vocab_size, eos
        self._thinking, self._begun = grammar.thinks, False

    def copy(self) -> Matcher:
        """Another one that is as far."""
        found = Matcher(self._inner.deep_copy(), self._grammar, self._vocab_size, self._eos)
        found._thinking, found._begun = self._thinking, self._begun
        return found

    @property
    def over(self) -> bool:
        """True if the text is complete and nothing can follow."""
        return not self._thinking and self._inner.is_stopped()

    def allowed(self) -> bytes:
        """A bit for each token that may come next, the lowest of the first byte for token 0."""
        if self._thinking:
            bits = np.ones(-(-self._vocab_size // 32) * 32, dtype=np.bool_)
            bits[[token for token in self._eos if token < len(bits)]] = False
            return np.packbits(bits, bitorder="little").tobytes()
        mask = self._inner.compute_bitmask()
        if error := self._inner.get_error():
            raise InvalidRequestError(f"the form of the answer became too complex: {error.strip().splitlines()[0][:300]}",
                                      field="response_format")
        opens = self._grammar.think_start
        if opens is None or self._begun:
            return mask
        found = bytearray(mask)
        found[opens // 8] |= 1 << opens % 8
        return bytes(found)

    def allowed_along(self, drafts: Sequence[int]) -> list[bytes]:
        """The same, and after each of the drafts, as far as they are allowed."""
        found, after = [self.allowed()], self
        for token in drafts:
            if not found[-1][token // 8] >> token % 8 & 1:
                break
            after = after.copy() if after is self else after
            after.accept(token)
            if after.over:
                break
            found.append(after.allowed())
        return found

    def accept(self, token: int) -> None:
        """The next token. Raises InternalError for one that is not allowed."""
        if self._thinking:
            self._thinking = token != self._grammar.think_end
        elif token == self._grammar.think_start and not self._begun:
            self._thinking = True
        elif not self._inner.consume_token(token):
            raise InternalError(f"token {token} does not go on with the form of the answer: {self._inner.get_error()[:300]}")
        self._begun = True

    def ends_with(self, token: int) -> bool:
        """True if the text is complete with this token and nothing can follow."""
        after = self.copy()
        after.accept(token)
        return after.over
