"""A model whose drafts are watched, and may be replaced by right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.layers.batch import DraftCache, ForwardBatch, LayerCache
from slipstream.models import registry
from slipstream.models.qwen import CausalLM
from slipstream.models.registry import DraftingModel, VisionModel
from tests.support.engine_driver import poison


@dataclass(kw_only=True)
class Drafted:
    """One draft that was made."""

    row: int
    """Of the token that it follows."""
    tokens: tuple[int, ...]
    """That token, behind the ones that were drafted in the same step before it."""
    logits: Tensor
    """[vocab]."""


@dataclass
class Watched:
    """A LanguageModel, DraftingModel and VisionModel around another. `right(row)`: how many drafts after a token at this row
    are to be right, by `texts`; None: they are the model's own."""

    model: CausalLM
    right: Callable[[int], int] | None = None
    texts: list[list[int]] = field(default_factory=list)
    """What is to come, whole."""
    made: list[Drafted] = field(default_factory=list)
    _tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kernels = self.model.kernels
        self._turn = 0

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], on_layer: Callable[[int], None] | None = None, *,
                hidden: Tensor | None = None, on_scored: Callable[[Tensor], None] | None = None) -> Tensor | None:
        """See LanguageModel."""
        self._turn, self._tokens = 0, {}
        return self.model.forward(batch, caches, on_layer, hidden=hidden, on_scored=on_scored)

    def encode_images(self, pixels: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """See VisionModel."""
        assert isinstance(self.model, VisionModel)
        return self.model.encode_images(pixels)

    def draft(self, tokens: Tensor, hidden: Tensor, before: Tensor, block_tables: Tensor, rows: Tensor, cache: DraftCache
              ) -> tuple[Tensor, Tensor]:
        """See DraftingModel."""
        assert isinstance(self.model, DraftingModel)
        found, output = self.model.draft(tokens, hidden, before, block_tables, rows, cache)
        logits = (self.model.lm_head or self.model.model.embed_tokens).logits(output)
        if logits is not None:
            for e, (token, row) in enumerate(zip(tokens.tolist(), rows.tolist(), strict=True)):
                key = int(block_tables[e, (row - self._turn) // cache.kv.shape[3]]) * 1000 + row - self._turn
                self._tokens[key] = (*self._tokens.get(key, ()), token)
                self.made.append(Drafted(row=row, tokens=self._tokens[key], logits=logits[e].clone()))
        if self.right is not None:
            for e, (token, row) in enumerate(zip(tokens.tolist(), rows.tolist(), strict=True)):
                after = next((text[row + 1] for text in self.texts if len(text) > row + 1 and text[row] == token), 0)
                found[e] = after if self._turn < self.right(row - self._turn) else (after + 1) % head_size(self.model)
        self._turn += 1
        return found, output


RIGHT: dict[str, Callable[[int], int] | None] = {
    "own": None, "none": lambda row: 0, "all": lambda row: 3, "mixed": lambda row: (0, 3, 1, 2, 3, 0, 2)[row % 7]}
"""How many drafts after each row are right."""


def engine(folder: Path, drafts: int, *, layer: bool = True, **config: Any) -> tuple[Engine, Watched]:
    """Over poisoned caches; `layer`: whether the checkpoint has the layer that drafts."""
    checkpoint = checkpoints.read(folder, drafts=layer)
    model = Watched(registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu")))
    values: dict[str, Any] = {"kv_cache_tokens": 16 * 40, "max_running": 6, "max_batch_tokens": 64, "state_snapshots": 6}
    made = Engine(model, checkpoint, EngineConfig(**values | config), draft_tokens=drafts)
    poison(made)
    return made, model


def head_size(model: CausalLM) -> int:
    """Tokens of the vocabulary."""
    return (model.lm_head or model.model.embed_tokens).tokens
