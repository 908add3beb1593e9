"""Every metric of a supervisor, declared once; the registry is passed in. Labels are bounded. Knows no Ray and no HTTP."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector

PREFIX = "slipstream_supervisor_"
REASONS = ("ended", "unresponsive", "failed_start")
"""Why a process is started again: it ended by itself, it was killed because of its probes, or its last start failed."""


class SupervisorMetrics:
    """`role` is prefill, decode or router, a member one replica or router; serving = wanted when all is well."""

    def __init__(self, registry: CollectorRegistry, wanted: Sequence[str], serving: Callable[[], Iterable[str]]) -> None:
        """`wanted`: the role of each process of the deployment; `serving`: of those that serve, asked at every scrape."""
        self.registry = registry
        ProcessCollector(registry=registry)
        self._wanted = Gauge(f"{PREFIX}replicas_wanted", "Members that the deployment has.", ("role",), registry=registry)
        serves = Gauge(f"{PREFIX}replicas_serving", "Members that said they were ready and have not ended.", ("role",),
                       registry=registry)
        self._restarts = Counter(f"{PREFIX}restarts", "Members that were started again.", ("role", "reason"),
                                 registry=registry)
        self._adopted = Counter(f"{PREFIX}adopted", "Members taken over from an earlier supervisor.", ("role",),
                                registry=registry)
        self.wants(wanted)
        for role in set(wanted):
            serves.labels(role).set_function(partial(_count, role, serving))
            self._adopted.labels(role)
            for reason in REASONS:
                self._restarts.labels(role, reason)

    def wants(self, roles: Iterable[str]) -> None:
        """From now on the deployment has these."""
        for role, count in Tally(roles).items():
            self._wanted.labels(role).set(count)

    def restarted(self, role: str, reason: str) -> None:
        """One of REASONS."""
        self._restarts.labels(role, reason).inc()

    def adopted(self, role: str) -> None:
        """A process goes on under this supervisor."""
        self._adopted.labels(role).inc()


def _count(role: str, serving: Callable[[], Iterable[str]]) -> float:
    return sum(one == role for one in serving())
