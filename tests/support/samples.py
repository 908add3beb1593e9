"""The demo checkpoint's sample prompts as token ids, grids and pixels, made with its own tokenizer and chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from slipstream.checkpoint import DEMO, Checkpoint
from slipstream.types import Grid

FOLDER = Path(__file__).parent.parent / "samples"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt and its right answer."""

    name: str
    tokens: tuple[int, ...]
    grids: tuple[Grid, ...]
    pixels: tuple[NDArray[np.uint8], ...]
    answer: str


class Samples:
    """Reads them; `decode` turns output ids into text."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.vision is not None
        self._tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        self._template = jinja2.Environment().from_string((DEMO / "chat_template.jinja").read_text())
        self._patch, self._merge = checkpoint.vision.patch_size, checkpoint.vision.merge_size
        self._stops = checkpoint.eos_token_ids

    def all(self) -> list[Sample]:
        """Every sample, in file order."""
        return [self._sample(json.loads(line)) for line in (FOLDER / "samples.jsonl").read_text().splitlines()]

    def text(self, question: str) -> Sample:
        """A question without pictures, whose answer nobody knows."""
        return self._sample({"id": "", "messages": [{"role": "user", "content": [{"type": "text", "text": question}]}],
                             "answer": ""})

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of an answer, without its stop token."""
        return str(self._tokenizer.decode([token for token in tokens if token not in self._stops]))

    def _sample(self, row: dict[str, Any]) -> Sample:
        names = [part["image"] for message in row["messages"] for part in message["content"] if part["type"] == "image"]
        pixels = tuple(np.array(Image.open(FOLDER / name).convert("RGB")) for name in names)
        grids = tuple(Grid(t=1, h=p.shape[0] // self._patch, w=p.shape[1] // self._patch) for p in pixels)
        head, *rest = self._template.render(messages=row["messages"], add_generation_prompt=True).split("<|image_pad|>")
        text = head + "".join("<|image_pad|>" * (grid.h * grid.w // self._merge**2) + part
                              for grid, part in zip(grids, rest, strict=True))
        return Sample(name=row["id"], tokens=self.encode(text), grids=grids, pixels=pixels, answer=row["answer"])
