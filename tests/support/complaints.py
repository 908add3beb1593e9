"""What a test's log complains of."""

from __future__ import annotations

import logging

import pytest


def complaints(caplog: pytest.LogCaptureFixture, least: int = logging.WARNING) -> list[str]:
    """Messages of this level and above. What gRPC's poller, of which a process has one, still has for the event loop of a test
    before is none of this test's."""
    return [record.getMessage() for record in caplog.records if record.levelno >= least and not _of_a_closed_loop(record)]


def _of_a_closed_loop(record: logging.LogRecord) -> bool:
    fault = record.exc_info[1] if record.exc_info else None
    return (record.name == "asyncio" and "PollerCompletionQueue" in record.getMessage() and isinstance(fault, RuntimeError)
            and str(fault) == "Event loop is closed")
