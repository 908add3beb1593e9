"""A replica of several ranks: how rank 0 leads and how the others follow. Knows no socket.

Every rank carries out the same log in the same order. Rank 0 writes an entry before it carries it out itself; it knows what a
step drew when the last stage has told it, and has as many steps in flight as there are stages. A rank that fails in the
middle of a step takes the replica down: the others cannot know how far it came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from slipstream.engine import log
from slipstream.engine.batch import StepInput
from slipstream.engine.executor import Computed, Draw, OnLayer, Published, RankExecutor, Result
from slipstream.engine.log import CopyBlock, CopyState, Entry, Step, Tokens
from slipstream.errors import GangError


class Log(Protocol):
    """The log as rank 0 sees it."""

    def append(self, entry: Entry) -> None:
        """Tell all other ranks. Raises GangError."""

    def next_tokens(self) -> Tokens:
        """What the last stage drew in the next step that it has not told yet; waits. Raises GangError."""


class LeadingExecutor:
    """Implements Executor on rank 0."""

    def __init__(self, local: RankExecutor, log: Log) -> None:
        assert local.shard is not None, "a replica of several ranks"
        self._local = local
        self._log = log
        self.depth = local.shard.geometry.pp

    def copy_block(self, source: int, target: int) -> None:
        """See Executor."""
        self._log.append(CopyBlock(source=source, target=target))
        self._local.copy_block(source, target)

    def copy_state(self, source: int, target: int) -> None:
        """See Executor."""
        self._log.append(CopyState(source=source, target=target))
        self._local.copy_state(source, target)

    def start(self, step: StepInput, embeds: torch.Tensor | None, draws: Sequence[Draw], published: Sequence[Published],
              on_layer: OnLayer) -> Result:
        """See Executor."""
        elsewhere = self.depth > 1
        self._log.append(log.step(step, draws=draws if elsewhere else (), published=published))
        try:
            computed = self._local.run(step, embeds, draws, on_layer)
        except Exception as error:
            raise GangError(f"rank 0 failed in a step: {type(error).__name__}: {error}") from error
        return self._wait if elsewhere else lambda: computed

    def _wait(self) -> Computed:
        return self._log.next_tokens().computed()


OnPublished = Callable[[Published, int], None]
"""(what, layer): this rank's layer has written its caches."""


def follow(entry: Entry, local: RankExecutor, tell: Callable[[Entry], None], on_published: OnPublished) -> None:
    """Carry out an entry of the engine's on another rank. `tell` reaches rank 0. Raises what the step raises: the rank is to
    end then."""
    match entry:
        case CopyBlock():
            local.copy_block(entry.source, entry.target)
        case CopyState():
            local.copy_state(entry.source, entry.target)
        case Step():
            def on_layer(layer: int) -> None:
                for published in entry.published:
                    on_published(published, layer)

            assert local.shard is not None
            draws = log.draws_of(entry, local.device) if local.shard.last and local.shard.tp_rank == 0 else []
            computed = local.run(entry.input(), None, draws, on_layer)
            if local.shard.geometry.pp > 1 and local.shard.last and local.shard.tp_rank == 0:
                tell(log.tokens(computed))
        case _:
            raise GangError(f"an entry of the log that is not known: {type(entry).__name__}")
