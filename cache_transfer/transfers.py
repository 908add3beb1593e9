"""The Transfer streams in flight at one rank, as source and as destination; what is logged and counted when one ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from cache_transfer.record import COMMITTED, StreamRecord
from slipstream.observability.transfer_metrics import TransferMetrics

logger = logging.getLogger(__name__)

MAX_NAME = 200
"""Characters of a name that a peer says, in a record."""


class Transfers:
    """One per rank. Everything happens on the event loop."""

    def __init__(self) -> None:
        self.metrics: TransferMetrics | None = None
        """Set once by a process that shows them."""
        self._in_flight: dict[StreamRecord, None] = {}

    def __iter__(self) -> Iterator[StreamRecord]:
        """Those in flight, the oldest first."""
        return iter(tuple(self._in_flight))

    def open(self, side: str, *, request_id: str, transfer_id: str, attempt: int, rank: int, peer: str, peer_rank: int,
             now: float, channel: str = "") -> StreamRecord:
        """A stream begins; it is in flight until its record's `end`."""
        record = StreamRecord(side=side, request_id=request_id[:MAX_NAME], transfer_id=transfer_id[:MAX_NAME], attempt=attempt,
                              rank=rank, peer=peer[:MAX_NAME], peer_rank=peer_rank, opened=now,
                              channel=channel, on_end=self._ended, on_quarantine=self._quarantined)
        self._in_flight[record] = None
        return record

    def quarantined(self) -> int:
        """Landings that are kept from use because a source that was given up may still write into them."""
        return sum(record.quarantined is not None for record in self._in_flight)

    def tried(self, channel: str, result: str) -> None:
        """A channel to one peer was `chosen`, has `failed` its probe, or is `not_offered`."""
        if self.metrics is not None:
            self.metrics.channel_tried(channel, result)

    def _quarantined(self, record: StreamRecord) -> None:
        if self.metrics is not None:
            self.metrics.quarantine_began(record.channel)

    def _ended(self, record: StreamRecord) -> None:
        del self._in_flight[record]
        said = {name: getattr(record, name) for name in ("request_id", "transfer_id", "attempt", "side", "rank", "peer",
                                                         "peer_rank", "channel", "outcome", "kv_bytes", "state_bytes")}
        times = {f"{event}_seconds": round(after, 6) for event, after in record.since_open().items()}
        logger.info("transfer ended: %s", record.outcome, extra={**said, **times})
        if self.metrics is not None:
            self.metrics.stream_ended(record.side, record.channel, record.outcome)
            if record.outcome == COMMITTED:
                self.metrics.stream_committed(record.side, record.channel, record.steps(), kv_bytes=record.kv_bytes,
                                              state_bytes=record.state_bytes)
