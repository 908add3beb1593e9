"""A replica that fails again and again gets no requests for a while. Knows no Session and no request.

Only the replica's own faults count: not the client's mistakes, not a lack of memory, not an overload, not a cancel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import (
    BusyError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    LeaseExpiredError,
    OverloadedError,
    PreemptedError,
    RequestTooLargeError,
    SlipstreamError,
)
from slipstream.types import Role

logger = logging.getLogger(__name__)

INNOCENT: tuple[type[SlipstreamError], ...] = (
    BusyError, CancelledError, DeadlineError, InvalidRequestError, LeaseExpiredError, OverloadedError, PreemptedError,
    RequestTooLargeError)
"""Failures that say nothing against the replica that reports them."""


@dataclass(kw_only=True)
class Breaker:
    """Of one replica. Open: nothing is sent while there are others; after `open_seconds` one request tries again."""

    failures: int
    """In a row, until it opens; 0: it never does."""
    open_seconds: float
    _count: int = 0
    _until: float | None = None

    def is_open(self, now: float) -> bool:
        """True while the replica is better left alone."""
        return self._until is not None and now < self._until

    def sent(self, now: float) -> None:
        """A request goes to the replica: if it is the one that tries, the others wait for what becomes of it."""
        if self._until is not None:
            self._until = now + self.open_seconds

    def failed(self, error: SlipstreamError, now: float) -> bool:
        """A leg failed there; True if that opened it."""
        if isinstance(error, INNOCENT) or not self.failures:
            return False
        self._count += 1
        if self._count < self.failures:
            return False
        opened, self._until = self._until is None, now + self.open_seconds
        return opened

    @property
    def has_opened(self) -> bool:
        """Since it was made."""
        return self._until is not None


class Breakers:
    """Of all replicas that have failed lately."""

    def __init__(self, failures: int, open_seconds: float, on_open: Callable[[Role], None],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._failures, self._seconds, self._on_open, self._clock = failures, open_seconds, on_open, clock
        self._of: dict[str, Breaker] = {}

    def open(self) -> set[str]:
        """Replicas that are better left alone now."""
        now = self._clock()
        return {id for id, breaker in self._of.items() if breaker.is_open(now)}

    def sent(self, id: str) -> None:
        """A leg goes to the replica."""
        if breaker := self._of.get(id):
            breaker.sent(self._clock())

    def failed(self, id: str, role: Role, error: SlipstreamError) -> None:
        """A leg failed there."""
        breaker = self._of.setdefault(id, Breaker(failures=self._failures, open_seconds=self._seconds))
        if breaker.failed(error, self._clock()):
            logger.warning("the %s replica at %s failed %d times in a row, the last time with: %s; it gets no requests for "
                           "%g s while there are others", role.value, id, self._failures, error.message, self._seconds)
            self._on_open(role)

    def succeeded(self, id: str) -> None:
        """A leg ended well there."""
        if (breaker := self._of.pop(id, None)) and breaker.has_opened:
            logger.info("the replica at %s answers well again", id)
