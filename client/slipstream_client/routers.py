"""Which of several routers is asked next, and when: failover, back-off, RetryInfo. Pure: time and chance are passed in.

A call is tried again only as long as nothing of its answer has come, and only for failures after which it may go well:
a router that could not be reached or said UNAVAILABLE, and an overload for which it said when to come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream_client.errors import ClientError, OverloadedError, UnavailableError


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often a call is tried, and how long to wait between."""

    attempts: int = 7
    """Over all routers, the first one included; 1: never again."""
    first_seconds: float = 0.2
    """Pause before a router is asked a second time; doubles each time."""
    most_seconds: float = 5.0


@dataclass
class _Router:
    failures: int = 0  # one after the other
    not_before: float = 0.0
    told: float = 0.0  # by RetryInfo: nobody asks before


class Routers:
    """What is known of each router; shared by all calls of a client."""

    def __init__(self, addresses: Sequence[str], retry: Retry) -> None:
        """Raises ValueError without an address."""
        if not addresses:
            raise ValueError("name one router at least: host:port")
        self.addresses = tuple(addresses)
        self.retry = retry
        self._routers = [_Router() for _ in addresses]
        self._turn = 0

    def choose(self, attempt: int, now: float) -> tuple[int, float]:
        """(router, seconds to wait first) of a call's try number `attempt`, from 1: the next in turn of those that may be asked
        now, else the one that may be soonest. A first try does not wait out the back-off of other calls."""
        count, routers = len(self._routers), self._routers
        order = [(self._turn + i) % count for i in range(count)]
        chosen = min(order, key=lambda i: max(0.0, routers[i].not_before - now))  # the first of equal ones
        self._turn = (chosen + 1) % count
        return chosen, max(0.0, (routers[chosen].told if attempt == 1 else routers[chosen].not_before) - now)

    def well(self, index: int) -> None:
        """A router has answered."""
        self._routers[index] = _Router()

    def failed(self, index: int, error: ClientError, attempt: int, now: float, chance: float) -> bool:
        """A call's try number `attempt` failed before anything came: whether to try again. `chance`: 0 to 1."""
        if not isinstance(error, UnavailableError | OverloadedError):
            return False
        router, retry = self._routers[index], self.retry
        if now >= router.not_before:  # else another call has counted this failure
            pause = min(retry.most_seconds, retry.first_seconds * 2.0 ** min(router.failures, 20)) * (0.5 + 0.5 * chance)
            router.failures += 1
            router.not_before = now + pause
        router.told = now + (error.retry_after_seconds or 0.0)
        router.not_before = max(router.not_before, router.told)
        return attempt < retry.attempts
