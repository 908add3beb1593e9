"""A step's tokens, and how prompts share them. Pure; knows no memory and no order of prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from slipstream.engine.sequence import Sequence

SHORT_SHARE = 4
"""One part in so many of a step's budget is for prompts that need no more than that."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one sequence does in one step: tokens [start, start + count) go through the model, the last ones perhaps drafts."""

    sequence: Sequence
    start: int
    count: int
    snapshots: tuple[tuple[int, int], ...] = ()
    """(length, state slot), ascending: the state after so many tokens of the sequence goes there."""
    drafts: tuple[int, ...] = ()
    """What follows the last token perhaps: they are verified."""
    room: int | None = None
    """Rows behind the first one that drafts for the next step may take; None: none are made."""

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after it."""
        return self.start + self.count

    @property
    def reach(self) -> int:
        """The end of the rows that are written."""
        return max(self.end, self.start + 1 + (self.room or 0))

    @property
    def samples(self) -> bool:
        """True if the step draws a token for each choice of the sequence."""
        return self.end >= self.sequence.prompt_tokens

    @property
    def sampled(self) -> int:
        """Rows whose logits are wanted: the last, and those before its drafts."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def scored(self) -> int:
        """Rows from the first on whose logits say how probable the prompt's next token was, if that is wanted."""
        request = self.sequence.request
        return 0 if request.prompt_logprobs is None else max(0, min(self.end, len(request.tokens) - 1) - self.start)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids that go in."""
        return self.sequence.token_ids(self.start, self.end - len(self.drafts)) + self.drafts


class Budget:
    """A step's tokens, shared out among prompts: long ones leave a part for the short ones that wait."""

    def __init__(self, tokens: int, chunk_tokens: int, block_size: int, waiting: Iterable[int]) -> None:
        """`waiting`: tokens that each prompt still needs."""
        self.left = tokens
        self._short = tokens // SHORT_SHARE
        self._long = tokens - min(self._short, sum(wanted for wanted in waiting if wanted <= self._short))
        self._chunk_tokens = chunk_tokens
        self._block_size = block_size

    def has_for(self, wanted: int) -> bool:
        """True if a prompt that needs so many tokens gets some of them."""
        return self.left > 0 and (wanted <= self._short or self._long > 0)

    def take(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens from `start` on go into this step; a chunk that does not end its prompt ends with a
        block, if it reaches one."""
        is_long = wanted > self._short
        count = min(wanted, self._chunk_tokens, self.left, self._long if is_long else self.left)
        if count < wanted:
            count = self._to_block(start, count)
        self.left -= count
        self._long -= count if is_long else 0
        return count

    def spend_rest(self, chunks: list[Chunk]) -> None:
        """The short prompts for which tokens were kept could not start: these go further."""
        for number, chunk in enumerate(chunks):
            if more := self.more(chunk):
                chunks[number] = replace(chunk, count=chunk.count + more)

    def more(self, chunk: Chunk) -> int:
        """How many tokens a chunk gets of what nobody else wanted."""
        wanted = chunk.sequence.prompt_tokens - chunk.end
        count = min(wanted, self._chunk_tokens - chunk.count, self.left)
        if count < wanted:
            count = max(0, self._to_block(chunk.start, chunk.count + count) - chunk.count)
        self.left -= count
        return count

    def _to_block(self, start: int, count: int) -> int:
        whole = (start + count) // self._block_size * self._block_size - start
        return whole if whole > 0 else count
