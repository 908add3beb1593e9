"""Carries out what a rank is told: copies, and steps through its part of the model. Decides nothing; knows no sequence.

Every rank of a replica is told the same in the same order (`slipstream.engine.log`), which is what makes their caches agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream import sharding
from slipstream.checkpoint import Checkpoint
from slipstream.engine import sampler
from slipstream.engine.batch import StepInput
from slipstream.engine.caches import CacheCopier
from slipstream.engine.drafting import Drafter, Drawn
from slipstream.engine.scoring import Scorer, Scores
from slipstream.layers.batch import LayerCache
from slipstream.layers.parallel import Communicator
from slipstream.models.registry import LanguageModel
from slipstream.types import RequestId

__all__ = ["Computed", "Draw", "Drawn", "Executor", "OnLayer", "Published", "RankExecutor", "Result"]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A token that is wanted of a step."""

    row: int
    """Of the step's logits; choices with the same tokens so far share one."""
    how: sampler.Draw


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a step makes final of a prompt that travels."""

    request: RequestId
    tokens: int
    """Of the prompt, from its start."""
    last: bool
    """Its states are final too."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What comes out of a step, where the logits do."""

    drawn: Sequence[Drawn] = ()
    """In the order of the draws."""
    scores: Scores | None = None
    """Of its scored rows, if there are any."""


OnLayer = Callable[[int], None]
Result = Callable[[], Computed]
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

    def start(self, step: StepInput, embeds: torch.Tensor | None, draws: Sequence[Draw], published: Sequence[Published],
              on_layer: OnLayer) -> Result:
        """Begin a step; results come in the order of the starts. `published`: for the other ranks; `on_layer(i)`: layer i of
        this rank has written its caches."""


class RankExecutor(CacheCopier):
    """One rank's part of every step; implements Executor for a replica of one rank."""

    depth = 1

    def __init__(self, model: LanguageModel, caches: Sequence[LayerCache], block_size: int, device: torch.device,
                 comm: Communicator | None, *, checkpoint: Checkpoint, dtype: torch.dtype, draft_tokens: int = 0) -> None:
        """`comm` None: the only rank. `dtype`: of what stages hand on. `draft_tokens`: the most that a sequence gets in a
        step."""
        super().__init__(caches)
        self.device = device
        self.shard = comm.shard if comm is not None else None
        self._model = model
        self._block_size = block_size
        self._comm = comm
        self._hidden = checkpoint.hidden_size
        self._levels = sharding.visual_levels(checkpoint, self.shard)
        self._dtype = dtype
        drafts = draft_tokens > 0 and (self.shard is None or self.shard.last)
        self._drafter = Drafter(model, caches[-1], draft_tokens, comm) if drafts else None

    def start(self, step: StepInput, embeds: torch.Tensor | None, draws: Sequence[Draw], published: Sequence[Published],
              on_layer: OnLayer) -> Result:
        """See Executor; the step is over when this returns."""
        computed = self.run(step, embeds, draws, on_layer)
        return lambda: computed

    def run(self, step: StepInput, embeds: torch.Tensor | None, draws: Sequence[Draw], on_layer: OnLayer) -> Computed:
        """Compute, copy what is to be kept, score and draw if the logits come out here. `embeds`: on rank 0, if there are image
        rows."""
        hidden, rows = None, len(step.visual_rows)
        if self._comm is not None:
            if not self._comm.shard.first:
                hidden = self._comm.recv((len(step.token_ids) + self._levels * rows, self._hidden), self._dtype)
            elif rows:
                embeds = self._comm.broadcast(embeds, (rows, (1 + self._levels) * self._hidden), self._dtype)
        batch = step.on(self.device, self._block_size, embeds)
        scorer = Scorer(step.scored, self.device)
        logits = self._model.forward(batch, self._caches, on_layer, hidden=hidden, on_scored=scorer.add)
        for source, target in step.copies.tolist():
            self.copy_state(source, target)
        drawn = draw(logits, draws) if logits is not None else []
        if self._drafter is not None:
            drawn = self._drafter.propose(step, batch, drawn)
        return Computed(drawn=drawn, scores=scorer.scores() if logits is not None and len(step.scored) else None)


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
