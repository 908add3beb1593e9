"""Brings what a decode replica has cached of a prompt to the prefill replica that will compute the prompt, before it does. What
goes wrong costs the client no more than the wait: the prompt is computed. Knows no policy and no text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from router.actions import Row
from router.link import WorkerLink
from router.request import RUN_MARK
from slipstream.errors import BusyError, SlipstreamError
from slipstream.v1 import worker_pb2

LOADED, GONE, BUSY, FAILED, LATE, CANCELLED = "loaded", "gone", "busy", "failed", "late", "cancelled"
"""What becomes of a load. `gone`: the decode replica had nothing of it any more, or no memory to hold it, or was lost; `busy`:
prefill had no room for it; `cancelled`: its request ended before it did."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it went."""

    outcome: str
    stats: worker_pb2.LegStats
    """The borrower's; `cached_tokens` are those that it can find now, and could not before."""
    message: str = ""
    """Why not."""


class _Side:
    """Implements `router.link.LegSink` for a leg that has no tokens."""

    def __init__(self) -> None:
        self.end: asyncio.Future[worker_pb2.LegStats] = asyncio.get_running_loop().create_future()
        self.end.add_done_callback(lambda end: end.cancelled() or end.exception())

    def on_tokens(self, attempt: int, rows: Sequence[Row]) -> None:
        """There are none."""

    def on_computed(self, message: worker_pb2.Finished) -> None:
        """There is nothing to compute."""

    def on_finished(self, message: worker_pb2.Finished) -> None:
        """It ended well."""
        if not self.end.done():
            self.end.set_result(message.stats)

    def on_failed(self, attempt: int, error: SlipstreamError) -> None:
        """It failed, or its Session was lost."""
        if not self.end.done():
            self.end.set_exception(error)

    def on_fault(self, error: SlipstreamError) -> None:
        """The router could not handle what it said."""
        self.on_failed(0, error)


class CacheLoad:
    """Of one run, from `source` to `target`."""

    def __init__(self, prompt: worker_pb2.Submit, handle: int, source: WorkerLink, target: WorkerLink, seconds: float) -> None:
        """`prompt`: tokens, output, images, salt, and the run's request id. `seconds`: the longest wait."""
        self._prompt = prompt
        self._handle = handle
        self._source = source
        self._target = target
        self._seconds = seconds
        self.outcome = Outcome(outcome=CANCELLED, stats=worker_pb2.LegStats())
        """Once `run` has ended."""

    async def run(self) -> None:
        """Until the target has it, or it is given up. Raises nothing but CancelledError."""
        lender, borrower, began = _Side(), _Side(), time.monotonic()
        try:
            self._submit(lender, borrower)
            async with asyncio.timeout(self._seconds):
                await asyncio.wait((lender.end, borrower.end), return_when=asyncio.FIRST_EXCEPTION)
            if (error := lender.end.exception() if lender.end.done() else None) is not None and not _is_well(borrower):
                self._ended(GONE, str(error))
                return
            self.outcome = Outcome(outcome=LOADED, stats=await borrower.end)
        except TimeoutError:
            self._ended(LATE, f"it was not there within {time.monotonic() - began:.1f} s")
        except SlipstreamError as error:
            self._ended(BUSY if isinstance(error, BusyError) else FAILED, error.message)
        finally:
            if self.outcome.outcome != LOADED:
                for link in (self._source, self._target):
                    link.cancel(self._handle, 0)

    def _ended(self, outcome: str, message: str) -> None:
        self.outcome = Outcome(outcome=outcome, stats=worker_pb2.LegStats(), message=message)

    def _submit(self, lender: _Side, borrower: _Side) -> None:
        """Raises UnavailableError."""
        source = self._source.connected()
        name = f"{self._prompt.request_id}{RUN_MARK}load"
        message = worker_pb2.Submit(handle=self._handle, transfer_id=f"{name}/{secrets.token_hex(16)}", cached=True,
                                    remaining_ms=max(1, int(1000 * self._seconds)))
        message.MergeFrom(self._prompt)
        message.request_id = name
        self._source.submit(message, lender)
        taking = worker_pb2.Submit(prefill_addresses=source.cache_store_addresses, prefill_epoch=source.epoch)
        taking.MergeFrom(message)
        self._target.submit(taking, borrower)


def _is_well(side: _Side) -> bool:
    return side.end.done() and side.end.exception() is None
