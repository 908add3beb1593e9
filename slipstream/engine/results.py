"""What an engine answers: memory that waits for bytes, or that bytes are read from, and what one step did. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.engine.sequence import Timing
from slipstream.errors import SlipstreamError
from slipstream.types import RequestId, TokenEvent


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Memory that waits for a prompt's bytes."""

    blocks: tuple[int, ...]
    """Block table of the prompt's rows; the blocks of its growth are owned too, and not named here."""
    state_slot: int | None
    have_tokens: int = 0
    """Rows [0, have_tokens), whole blocks, are in the prefix cache already: nobody may write into them."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did."""

    events: tuple[TokenEvent, ...] = ()
    failures: tuple[tuple[RequestId, SlipstreamError], ...] = ()
    """Requests that ended by a fault; everything they owned has returned."""
    timings: dict[RequestId, Timing] = field(default_factory=dict)
    """Of every request whose last choice ended, or that was handed off, in this step."""
    handed_off: frozenset[RequestId] = frozenset()
    """Prompts whose first tokens were drawn in this step, and whose state is complete for `release`."""
    tokens: int = 0
    """That went through the model."""
    seconds: float = 0.0

    @property
    def stalled(self) -> bool:
        """True if nothing could run: another step is of no use until the engine is told something."""
        return self.tokens == 0 and not self.failures
