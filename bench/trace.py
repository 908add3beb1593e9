"""Requests in the format of Mooncake's traces (timestamp in ms, input_length, output_length, hash_ids of 512 tokens each).

Synthetic, from a seed: conversations that come back with all that was said, over system prompts of which some are asked far
more than others, and single long prompts that nobody asks again. No line of a published trace is in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

BLOCK_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Request:
    """One line of a trace."""

    timestamp: float
    """Milliseconds from the start."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    """One for each 512 tokens of the input, the last, partial ones included: equal ids have equal tokens before them too."""


def synthetic(seed: int, requests: int, per_second: float) -> list[Request]:
    """`requests` in order of time, `per_second` of them on average (Poisson)."""
    chance = random.Random(seed)
    names = iter(range(1 << 60))
    systems = [[next(names) for _ in range(chance.randint(1, 10))] for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    open_chats: list[tuple[list[int], int]] = []  # what was said so far, in whole blocks, and in tokens
    found, now = [], 0.0
    for _ in range(requests):
        now += 1000 * chance.expovariate(per_second)
        output = max(1, int(chance.lognormvariate(5.3, 0.8)))
        kind = chance.random()
        if kind < 0.55 and open_chats:
            blocks, tokens = open_chats.pop(chance.randrange(len(open_chats)))
        elif kind < 0.85:
            blocks = list(chance.choices(systems, weights)[0])
            tokens = BLOCK_TOKENS * len(blocks)
        else:
            blocks, tokens = [], 0
        more = max(16, int(chance.lognormvariate(9.0 if kind >= 0.85 else 6.8, 0.9)))
        length = min(tokens + more, 120_000)
        blocks = blocks[: length // BLOCK_TOKENS]
        whole = blocks + [next(names) for _ in range(length // BLOCK_TOKENS - len(blocks))]
        last = [next(names)] if length % BLOCK_TOKENS else []
        found.append(Request(timestamp=now, input_length=length, output_length=output, hash_ids=(*whole, *last)))
        if kind < 0.85 and length < 100_000 and chance.random() < 0.8:
            open_chats.append((whole, BLOCK_TOKENS * len(whole)))
            if len(open_chats) > 400:
                open_chats.pop(0)
    return found
