"""Prompts for the tiny models, of tokens alone and with pictures."""

from __future__ import annotations

import numpy as np

from slipstream.types import Grid
from tests.support import tiny
from tests.support.worker_client import Prompt

MAX_TOKENS = 20


def texts() -> list[Prompt]:
    """Lengths around a block's."""
    draw = np.random.default_rng(5)
    return [Prompt(tokens=draw.integers(1, 490, length).tolist(), max_tokens=MAX_TOKENS, ignore_eos=True)
            for length in (1, 15, 16, 17, 64, 150)]


def with_pictures() -> list[Prompt]:
    """One picture, two adjacent ones of different aspect, a picture as the last thing of the prompt."""
    draw = np.random.default_rng(6)

    def picture(height: int, width: int) -> tuple[list[int], object, Grid]:
        pixels = draw.integers(0, 256, (height * 32, width * 32, 3), dtype=np.uint8)
        return [tiny.IMAGE] * (height * width), pixels, Grid(t=1, h=2 * height, w=2 * width)

    def prompt(*parts: object) -> Prompt:
        tokens: list[int] = []
        pixels, grids = [], []
        for part in parts:
            if isinstance(part, tuple):
                tokens += [tiny.VISION_START, *part[0], tiny.VISION_END]
                pixels.append(part[1])
                grids.append(part[2])
            else:
                assert isinstance(part, list)
                tokens += part
        return Prompt(tokens=tokens, pixels=pixels, grids=grids, max_tokens=MAX_TOKENS, ignore_eos=True)

    last = prompt([9, 8], picture(3, 4))
    return [prompt([5, 6, 7], picture(4, 3), [11, 12]), prompt(picture(2, 5), picture(6, 2), [30] * 9),
            Prompt(tokens=last.tokens[:-1], pixels=last.pixels, grids=last.grids, max_tokens=MAX_TOKENS, ignore_eos=True)]


def prompts_for(name: str) -> list[Prompt]:
    """Of a model of tests/support/tiny.py."""
    return texts() + (with_pictures() if "_vl" in name else [])
