"""Carries out what a rank is told: copies, and steps through its part of the model. Decides nothing; knows no sequence.

Every rank of a replica is told the same in the same order (`slipstream.engine.log`), which is what makes their caches agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.engine import sampler
from slipstream.engine.batch import StepInput
from slipstream.engine.caches import CacheCopier
from slipstream.layers.batch import LayerCache
from slipstream.models.registry import LanguageModel
from slipstream.types import Logprobs


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One token, or None: its logits are not finite."""

    token: int | None
    logprobs: Logprobs | None = None
    """If the draw asked for them."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A token that is wanted of a step."""

    row: int
    """Of the step's logits; choices with the same tokens so far share one."""
    how: sampler.Draw


OnLayer = Callable[[int], None]
Result = Callable[[], list[Drawn]]
"""Waits for the end of a step."""


class Executor(Protocol):
    """What rank 0 tells all ranks."""

    @property
    def depth(self) -> int:
        """Steps that are worth having in flight at once: one per pipeline stage."""

    def copy_block(self, source: int, target: int) -> None:
        """Keys and values of one block in every layer."""

    def copy_state(self, source: int, target: int) -> None:
        """Conv and recurrent states of one slot in every layer."""

    def start(self, step: StepInput, embeds: torch.Tensor | None, draws: Sequence[Draw], on_layer: OnLayer) -> Result:
        """Begin a step; results come in the order of the starts. `on_layer(i)`: layer i of this rank has written its caches."""


class LocalExecutor(CacheCopier):
    """One rank that is a whole replica; implements Executor."""

    depth = 1

    def __init__(self, model: LanguageModel, caches: Sequence[LayerCache], block_size: int, device: torch.device) -> None:
        super().__init__(caches)
        self._model = model
        self._block_size = block_size
        self._device = device

    def start(self, step: StepInput, embeds: torch.Tensor | None, draws: Sequence[Draw], on_layer: OnLayer) -> Result:
        """See Executor; the step is over when this returns."""
        drawn = self.run(step, embeds, draws, on_layer)
        return lambda: drawn

    def run(self, step: StepInput, embeds: torch.Tensor | None, draws: Sequence[Draw], on_layer: OnLayer) -> list[Drawn]:
        """Compute, copy what is to be kept, draw."""
        batch = step.on(self._device, self._block_size, embeds)
        logits = self._model.forward(batch, self._caches, on_layer)
        for source, target in step.copies.tolist():
            self.copy_state(source, target)
        return draw(logits, draws)


def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """A token for each draw, from [R, vocab] logits."""
    if not draws:
        return []
    if len(draws) > len(logits):
        logits = logits[torch.tensor([one.row for one in draws], device=logits.device)]
    wanted = [one.how for one in draws]
    tokens = sampler.sample(logits, wanted)
    told = sampler.logprobs(logits, wanted, tokens)
    return [Drawn(token=token, logprobs=more) for token, more in zip(tokens, told, strict=True)]
