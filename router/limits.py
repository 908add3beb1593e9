"""How much work a router takes at once. Pure."""

from __future__ import annotations

from slipstream.errors import OverloadedError


class Limits:
    """Counts admitted requests; the one beyond the limit is refused at once instead of waiting for ever."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.in_flight = 0

    def admit(self) -> None:
        """Count one request. Raises OverloadedError when the router is full; whoever was admitted calls `leave` once."""
        if self.in_flight >= self.max_in_flight:
            raise OverloadedError(f"{self.in_flight} requests are in flight, the limit of this router; come back later",
                                  retry_after_seconds=1.0)
        self.in_flight += 1

    def leave(self) -> None:
        """An admitted request ended."""
        assert self.in_flight > 0, "leave without admit"
        self.in_flight -= 1
