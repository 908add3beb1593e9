"""Every metric of a rank's Transfer streams, declared once; the registry is passed in. Labels are bounded. Knows no channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from slipstream.observability.worker_metrics import PREFIX
from slipstream.types import Role

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BYTES = tuple(float(4**power << 10) for power in range(1, 13))  # 4 KiB to 16 GiB
NO_CHANNEL = "none"


class TransferMetrics:
    """Of one rank, rank 0 or not. A stream joins one rank of a source and one of a destination, and each counts its end of it:
    over all ranks, the committed ones and the bytes of both sides are equal when all is well."""

    def __init__(self, registry: CollectorRegistry, role: Role, quarantined: Callable[[], int]) -> None:
        """`quarantined`: landings that are kept from use now; asked at every scrape."""
        self._role = role.value
        side = ("role", "side", "channel")
        self._streams = Counter(f"{PREFIX}streams", "Transfer streams that ended at this rank, by how.", (*side, "outcome"),
                                registry=registry)
        self._seconds = Histogram(f"{PREFIX}stream_seconds", "Time of each step of a committed stream.", (*side, "step"),
                                  buckets=_SECONDS, registry=registry)
        self._bytes = Histogram(f"{PREFIX}stream_bytes", "Payload of a committed stream.", (*side, "kind"), buckets=_BYTES,
                                registry=registry)
        self._tried = Counter(f"{PREFIX}channel_choices", "Channels that were looked at for a peer, by the result.",
                              ("role", "channel", "result"), registry=registry)
        self._quarantines = Counter(f"{PREFIX}quarantines", "Landings that were kept from use because the source might still "
                                    "write.", ("role", "channel"), registry=registry)
        kept = Gauge(f"{PREFIX}quarantined", "Landings that are kept from use now.", ("role",), registry=registry)
        kept.labels(self._role).set_function(quarantined)

    def quarantine_began(self, channel: str) -> None:
        """Count one landing."""
        self._quarantines.labels(self._role, channel).inc()

    def stream_ended(self, side: str, channel: str, outcome: str) -> None:
        """Count one stream."""
        self._streams.labels(self._role, side, channel or NO_CHANNEL, outcome).inc()

    def stream_committed(self, side: str, channel: str, steps: Mapping[str, float], *, kv_bytes: int, state_bytes: int) -> None:
        """Take the measures of one that moved a prompt's state into use."""
        for step, seconds in steps.items():
            self._seconds.labels(self._role, side, channel, step).observe(seconds)
        for kind, count in (("kv", kv_bytes), ("state", state_bytes)):
            self._bytes.labels(self._role, side, channel, kind).observe(count)

    def channel_tried(self, channel: str, result: str) -> None:
        """Count one look: `chosen`, `failed` (its probe) or `not_offered`."""
        self._tried.labels(self._role, channel, result).inc()
