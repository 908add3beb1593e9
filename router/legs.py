"""The ears of one leg of a request: what its worker says, in the words of the request's state machine. Knows no connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from router.actions import LegStats, Row
from slipstream.errors import SlipstreamError
from slipstream.types import Role
from slipstream.v1 import worker_pb2


class Request(Protocol):
    """Whose leg it is."""

    def leg_told(self, run: int, role: Role, attempt: int, rows: Sequence[Row]) -> None:
        """Tokens."""

    def leg_computed(self, run: int, role: Role, attempt: int, stats: LegStats) -> None:
        """What it did so far."""

    def leg_finished(self, run: int, role: Role, attempt: int, stats: LegStats, *, handed_off: bool) -> None:
        """It ended well."""

    def leg_failed(self, run: int, role: Role, attempt: int, error: SlipstreamError) -> None:
        """It failed, or its Session was lost."""

    def give_up(self, error: SlipstreamError) -> None:
        """The request cannot go on."""


@dataclass(eq=False)
class Ears:
    """Implements `router.link.LegSink`."""

    run: int
    role: Role
    request: Request

    def on_tokens(self, attempt: int, rows: Sequence[Row]) -> None:
        """Tokens of one step."""
        self.request.leg_told(self.run, self.role, attempt, rows)

    def on_computed(self, message: worker_pb2.Finished) -> None:
        """What the leg did; its end comes later."""
        self.request.leg_computed(self.run, self.role, message.attempt, _stats(message.stats))

    def on_finished(self, message: worker_pb2.Finished) -> None:
        """The leg ended well."""
        self.request.leg_finished(self.run, self.role, message.attempt, _stats(message.stats), handed_off=message.handed_off)

    def on_failed(self, attempt: int, error: SlipstreamError) -> None:
        """The leg failed, or its Session was lost."""
        self.request.leg_failed(self.run, self.role, attempt, error)

    def on_fault(self, error: SlipstreamError) -> None:
        """The router could not handle what the leg said."""
        self.request.give_up(error)


def _stats(told: worker_pb2.LegStats) -> LegStats:
    return LegStats(**{key.name: getattr(told, key.name) for key in fields(LegStats)})


def first_of(errors: BaseExceptionGroup[SlipstreamError]) -> SlipstreamError:
    """The first single error of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SlipstreamError)
    return error
