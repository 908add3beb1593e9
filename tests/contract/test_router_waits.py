"""What a router says of workers that are not there: at their start it waits, later it warns."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from router import link as links
from router.link import WorkerLink
from slipstream.types import Role
from tests.support.fake_workers import FakeWorker, Script


class Told(logging.Handler):
    """What the router logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self.changed = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))
        self.changed.set()

    async def until(self, count: int) -> list[tuple[str, str]]:
        async with asyncio.timeout(10):
            while len(self.lines) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.lines


@pytest.mark.parametrize("stays_away", [False, True])
async def test_a_worker_that_loads_is_waited_for_and_one_that_stays_away_warned_of(monkeypatch: pytest.MonkeyPatch,
                                                                                  caplog: pytest.LogCaptureFixture,
                                                                                  stays_away: bool) -> None:
    told = Told()
    monkeypatch.setattr(links.logger, "handlers", [told])
    caplog.set_level(logging.INFO, links.logger.name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    link = WorkerLink(address, lambda link, info: None, lambda: None)
    wanted = [("INFO", f"waiting for the worker at {address}")]
    assert await told.until(1) == wanted
    if stays_away:
        monkeypatch.setattr(links, "PATIENCE_SECONDS", 0.0)
        wanted.append(("WARNING", f"the worker at {address} cannot be used: nothing listens there"))
        assert await told.until(2) == wanted
    worker = FakeWorker(Script(), Role.PREFILL)
    await worker.start(address)
    try:
        wanted.append(("INFO", f"connected to prefill-0 at {address}, epoch 1"))
        assert await told.until(len(wanted)) == wanted
        await worker.stop()
        assert [level for level, _ in (await told.until(len(wanted) + 1))[len(wanted) :]] == ["WARNING"], "it was there"
    finally:
        await link.close()
        await worker.stop()
