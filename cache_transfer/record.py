"""What one end of one Transfer stream knows of it: when what happened, how much came, how it ended. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cache_transfer.coverage import Coverage

SEND, RECEIVE = "send", "receive"
COMMITTED, DISCARDED = "committed", "discarded"
"""The destination took the prompt's state into use, or has no need of it."""
BUSY, LOST, CUT, CANCELLED = "busy", "lost", "cut", "cancelled"
"""The destination had no memory; the way or the peer was lost; ended with the other streams of its attempt, or by a higher
attempt; given up by the destination's owner. Any other outcome is the code of an error."""

EVENTS = {"begun": "begin", "ready": "ready", "first_byte": "first_byte", "last_byte": "last_byte", "ended": "end"}
"""What happens to a stream, in this order, and the name of the time that it took since what happened before."""
PHASES = {"opened": "opened", "begun": "begun", "ready": "ready", "first_byte": "moving", "last_byte": "moved"}


@dataclass(kw_only=True, eq=False, slots=True)
class StreamRecord:
    """Its owner is the task that serves the stream. Times are of one monotonic clock, in seconds; None: has not happened."""

    side: str
    """SEND or RECEIVE."""
    request_id: str
    transfer_id: str
    attempt: int
    rank: int
    """Of this end in its replica."""
    peer: str
    """The other end's replica, and which rank of it."""
    peer_rank: int
    opened: float
    on_end: Callable[[StreamRecord], None] = field(repr=False)
    on_quarantine: Callable[[StreamRecord], None] = field(repr=False)
    channel: str = ""
    """Empty before the source has agreed to it."""
    begun: float | None = None
    ready: float | None = None
    first_byte: float | None = None
    """The source: begins to send it; the destination: it has landed."""
    last_byte: float | None = None
    """The source: the channel has taken all; the destination: the latest that has landed."""
    quarantined: float | None = None
    """Since then it is given up, but the source may still write: the landing is kept from use."""
    ended: float | None = None
    """The destination: Done was said, or nobody writes any more; the source: Done was heard, or it has stopped."""
    outcome: str = ""
    coverage: Coverage | None = None
    """What is counted, from Ready on; a source counts what it has begun to send."""

    def end(self, now: float, outcome: str) -> None:
        """It is over. Repeats do nothing; an outcome that was set before stays."""
        if self.ended is None:
            self.ended, self.outcome = now, self.outcome or outcome
            self.on_end(self)

    def quarantine(self, now: float) -> None:
        """It is given up, and the landing kept from use."""
        self.quarantined = now
        self.on_quarantine(self)

    @property
    def phase(self) -> str:
        """Of a stream in flight: `quarantined`, or what happened last, by PHASES."""
        if self.quarantined is not None:
            return "quarantined"
        return PHASES[[event for event in PHASES if getattr(self, event) is not None][-1]]

    @property
    def kv_bytes(self) -> int:
        """So far."""
        return self.coverage.kv_bytes if self.coverage is not None else 0

    @property
    def state_bytes(self) -> int:
        """So far."""
        return self.coverage.state_bytes if self.coverage is not None else 0

    @property
    def total_bytes(self) -> int | None:
        """KV and states that this stream has to move; None before Ready."""
        return self.coverage.total_bytes if self.coverage is not None else None

    def since_open(self) -> dict[str, float]:
        """Seconds from Open to each event that has happened, by its name in EVENTS."""
        return {event: at - self.opened for event in EVENTS if (at := getattr(self, event)) is not None}

    def steps(self) -> dict[str, float]:
        """Seconds that each step took, by the values of EVENTS."""
        found, before = {}, 0.0
        for event, after in self.since_open().items():
            found[EVENTS[event]], before = after - before, after
        return found
