"""Counters and histograms that never raise, and take no value that would spoil them. Knows no metric of ours."""

from __future__ import annotations

import logging
import math

from prometheus_client import Counter, Histogram

logger = logging.getLogger(__name__)


def guarded(faults: Counter) -> tuple[type[Counter], type[Histogram]]:
    """Kinds that log a value that is negative, infinite or no number, and count it in `faults` instead of taking it."""

    def good(name: str, amount: float) -> bool:
        if 0 <= amount < math.inf:
            return True
        logger.error("%s cannot grow by %s; that is a bug, and was not counted", name, amount)
        faults.inc()
        return False

    class GuardedCounter(Counter):
        def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
            if good(self._name, amount):
                super().inc(amount, exemplar)

    class GuardedHistogram(Histogram):
        def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
            if good(self._name, amount):
                super().observe(amount, exemplar)

    return GuardedCounter, GuardedHistogram
