"""The ordered log of a replica of several ranks: what rank 0 tells all others to do, and what they tell it. Knows no socket.

Entries are msgpack maps with a `type`; every rank carries them out in the order in which they were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import msgspec
import numpy as np
import torch

from slipstream.engine import sampler
from slipstream.engine.batch import StepInput
from slipstream.engine.executor import Computed, Draw, Drawn, Published
from slipstream.engine.scoring import Scores
from slipstream.types import Logprobs, SamplingParams

_ARRAYS = tuple(field.name for field in fields(StepInput))


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """One line of the log, in either direction."""


class WireDraw(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A Draw for the rank that draws."""

    row: int
    params: SamplingParams
    choice: int
    index: int
    barred: tuple[int, ...] = ()
    allowed: bytes | None = None
    prompt: bytes | None = None
    """int32."""
    outputs: tuple[int, ...] = ()


# Down -----------------------------------------------------------------------------------------------------------------


class Step(Entry, frozen=True):
    """Compute."""

    shapes: tuple[tuple[int, ...], ...]
    arrays: tuple[bytes, ...]
    """int32, in the order of StepInput's fields."""
    draws: tuple[WireDraw, ...] = ()
    """For the last stage, if that is not rank 0's own."""
    published: tuple[Published, ...] = ()

    def input(self) -> StepInput:
        """The arrays."""
        parts = {name: np.frombuffer(bytearray(data), dtype=np.int32).reshape(shape)  # writable, as torch wants it
                 for name, shape, data in zip(_ARRAYS, self.shapes, self.arrays, strict=True)}
        return StepInput(**parts)


class CopyBlock(Entry, frozen=True):
    """Copy keys and values of a block."""

    source: int
    target: int


class CopyState(Entry, frozen=True):
    """Copy the states of a slot."""

    source: int
    target: int


class Beat(Entry, frozen=True):
    """Nothing: whoever says nothing for too long is lost."""


class End(Entry, frozen=True):
    """The replica ends in order: nothing comes after this."""


# Up -------------------------------------------------------------------------------------------------------------------


class Tokens(Entry, frozen=True):
    """What the last stage drew, in the order of the draws."""

    drawn: tuple[tuple[int | None, Logprobs | None, tuple[int, ...]], ...]
    """With the drafts of the tokens after."""
    scores: tuple[bytes, bytes, bytes, bytes] | None = None
    """float32, int32, int32, float32: in the order of Scores' fields."""

    def computed(self) -> Computed:
        """What the step put out there."""
        scores = None
        if self.scores is not None:
            own, ranks, ids, best = self.scores
            logprobs = np.frombuffer(own, dtype=np.float32)
            scores = Scores(logprobs=logprobs, ranks=np.frombuffer(ranks, dtype=np.int32),
                            top_tokens=np.frombuffer(ids, dtype=np.int32).reshape(len(logprobs), -1),
                            top_logprobs=np.frombuffer(best, dtype=np.float32).reshape(len(logprobs), -1))
        return Computed(drawn=[Drawn(token=token, logprobs=told, drafts=drafts) for token, told, drafts in self.drawn],
                        scores=scores)


# ----------------------------------------------------------------------------------------------------------------------


def step(input: StepInput, *, draws: Sequence[Draw], published: Sequence[Published]) -> Step:
    """For the log."""
    arrays = [np.ascontiguousarray(getattr(input, name), dtype=np.int32) for name in _ARRAYS]
    return Step(shapes=tuple(array.shape for array in arrays), arrays=tuple(array.tobytes() for array in arrays),
                draws=tuple(map(_to_wire, draws)), published=tuple(published))


def draws_of(entry: Step, device: torch.device) -> list[Draw]:
    """What a step draws, for the sampler."""
    return [Draw(row=one.row, how=sampler.Draw(
        params=one.params, choice=one.choice, index=one.index, barred=frozenset(one.barred), outputs=one.outputs,
        allowed=one.allowed,
        prompt=None if one.prompt is None else torch.tensor(np.frombuffer(one.prompt, dtype=np.int32).astype(np.int64),
                                                            device=device))) for one in entry.draws]


def tokens(computed: Computed) -> Tokens:
    """For rank 0."""
    drawn = tuple((one.token, one.logprobs, one.drafts) for one in computed.drawn)
    if (scores := computed.scores) is None:
        return Tokens(drawn=drawn)
    return Tokens(drawn=drawn, scores=(scores.logprobs.tobytes(), scores.ranks.tobytes(), scores.top_tokens.tobytes(),
                                       scores.top_logprobs.tobytes()))


def _to_wire(draw: Draw) -> WireDraw:
    how = draw.how
    prompt = how.prompt.to("cpu", torch.int32).numpy().tobytes() if how.prompt is not None else None
    return WireDraw(row=draw.row, params=how.params, choice=how.choice, index=how.index, barred=tuple(sorted(how.barred)),
                    allowed=how.allowed, prompt=prompt, outputs=() if how.plain else tuple(how.outputs))
