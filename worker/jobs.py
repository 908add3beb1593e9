"""The legs of requests that run on this replica: each from Submit until everything it owned has returned. Knows no role.

A job is one asyncio task, watched by another one that is never cancelled: whatever ends the work (its own end, a failure, a
cancel, a deadline), the router is told at once, then the work is stopped, then its resources return.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.engine.sequence import GenerationRequest, Timing
from slipstream.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    PreemptedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.observability import logs
from slipstream.observability.worker_metrics import OK
from slipstream.rpc import convert
from slipstream.types import MropeState, RequestId, TokenEvent
from slipstream.v1 import worker_pb2 as pb

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Who measures legs."""

    def landed(self, stats: pb.LegStats) -> None:
        """A prompt's state has come from prefill, whole."""

    def ended(self, outcome: str, stats: pb.LegStats) -> None:
        """A leg has ended, or never began: `ok`, or the code of the error."""


class Nobody:
    """An Observer that measures nothing."""

    def landed(self, stats: pb.LegStats) -> None:
        """Ignored."""

    def ended(self, outcome: str, stats: pb.LegStats) -> None:
        """Ignored."""


class Outbox(Protocol):
    """Where a job's news go: to the router that submitted it."""

    def token(self, handle: int, attempt: int, event: TokenEvent) -> None:
        """One sampled token."""

    def computed(self, message: pb.Finished) -> None:
        """What a leg that has not ended did."""

    def finished(self, message: pb.Finished) -> None:
        """The leg ended well."""

    def failed(self, message: pb.Failed) -> None:
        """The leg ended by an error."""

    def over(self, handle: int, attempt: int) -> None:
        """All that the job owned has returned."""


class Job:
    """One leg of one request: what was asked, who asked, and what the router has been told."""

    def __init__(self, submit: pb.Submit, request: GenerationRequest, outbox: Outbox, deadline: float) -> None:
        """`deadline`: in the event loop's time."""
        self.submit = submit
        self.request = request
        self.deadline = deadline
        self.stats = pb.LegStats()
        self.told = False
        """The router knows how this leg ended; nothing more is sent."""
        self.outcome = ""
        """What it knows: `ok`, or the code of the error."""
        self.observer: Observer = Nobody()
        self.first_tokens: asyncio.Future[FirstTokens] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has drawn the last token."""
        self._outbox = outbox
        self._work: asyncio.Task[None] | None = None
        self._given_up: SlipstreamError | None = None

    def __str__(self) -> str:
        return str(self.request.id)

    def token(self, event: TokenEvent) -> None:
        """Report a token."""
        if not self.told:
            self._outbox.token(self.submit.handle, self.submit.attempt, event)

    def tell_stats(self) -> None:
        """Report what the leg did before its end: all that it will have done."""
        if not self.told:
            self._outbox.computed(pb.Finished(handle=self.submit.handle, attempt=self.submit.attempt, stats=self.stats))

    def finish(self, *, handed_off: bool) -> None:
        """Report the end of the leg."""
        if not self.told:
            self.told, self.outcome = True, OK
            self._outbox.finished(pb.Finished(handle=self.submit.handle, attempt=self.submit.attempt, handed_off=handed_off,
                                              stats=self.stats))

    def fail(self, error: SlipstreamError) -> None:
        """Report a failure."""
        if not self.told:
            self.told, self.outcome = True, error.code
            self._outbox.failed(convert.failed_to_pb(self.submit.handle, self.submit.attempt, error))

    def abandon(self, error: SlipstreamError) -> None:
        """Report a failure and stop the work, in whatever state it is. Its resources return soon after."""
        self.fail(error)
        self._given_up = self._given_up or error
        if self._work is not None:
            self._work.cancel()

    async def run(self, role: RoleWorker) -> None:
        """The whole life of the job; returns when everything has returned. Never raises, is never cancelled."""
        logs.request_id.set(str(self))
        loop = asyncio.get_running_loop()
        error = self._given_up
        if error is None:
            self._work = asyncio.create_task(role.work(self))
            done, _ = await asyncio.wait({self._work}, timeout=max(0.0, self.deadline - loop.time()))
            if not done:
                self.abandon(DeadlineError("the deadline passed on this replica; raise the timeout or lower the load"))
                await asyncio.wait({self._work})
            cut_off = self._given_up or InternalError("the work on this request was cut off")
            error = cut_off if self._work.cancelled() else _outcome(self._work)
        if error is not None:
            self.fail(error)
        elif not self.told:
            self.fail(InternalError("the work on this request ended without a result"))
        try:
            await role.clean_up(self, error)
        except Exception:
            logger.exception("returning the resources of a request failed")
        self._outbox.over(self.submit.handle, self.submit.attempt)


@dataclass(frozen=True, kw_only=True)
class PromptDone:
    """What the engine knows of a prompt when its first tokens are drawn."""

    mrope: MropeState
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class FirstTokens:
    """The first token of each choice."""

    events: tuple[TokenEvent, ...]
    prompt: PromptDone

    @property
    def finished(self) -> bool:
        """True if no choice goes on."""
        return all(event.finish is not None for event in self.events)


class RoleWorker(Protocol):
    """What a role does with a job."""

    async def work(self, job: Job) -> None:
        """Serve the job to its end; cancelled when it is given up."""

    async def clean_up(self, job: Job, error: SlipstreamError | None) -> None:
        """Fence what may still touch the job's memory, then return it. Called once, after `work`, and never cancelled."""

    def on_tokens(self, job: Job, events: Sequence[TokenEvent], timing: Timing | None, prompt: PromptDone | None) -> None:
        """The engine drew tokens in a step. `timing`: set with the last ones here; `prompt`: set with a prompt's first ones."""


class Jobs:
    """All jobs of the replica, by the engine's request id."""

    def __init__(self, role: RoleWorker, observer: Observer | None = None) -> None:
        self._role = role
        self.observer = observer or Nobody()
        self._jobs: dict[RequestId, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.idle = asyncio.Event()
        """Set while there is no job."""
        self.idle.set()
        self.draining = False
        self.started = 0
        """Jobs so far."""

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, job: Job) -> None:
        """Begin. Raises UnavailableError while draining, InvalidRequestError for a request id and attempt that run already."""
        if self.draining:
            raise UnavailableError("this replica is draining; send the request to another one", retry_after_seconds=1.0)
        if job.request.id in self._jobs:
            raise InvalidRequestError(f"request {job} runs here already; a new attempt needs a higher number",
                                      field="request_id")
        self._jobs[job.request.id] = job
        job.observer = self.observer
        self.started += 1
        self.idle.clear()
        task = asyncio.create_task(self._run(job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job) -> None:
        try:
            await job.run(self._role)
        finally:
            del self._jobs[job.request.id]
            if not self._jobs:
                self.idle.set()
            self.observer.ended(job.outcome, job.stats)

    def on_step(self, tokens: Iterable[tuple[Sequence[TokenEvent], Timing | None, PromptDone | None]],
                failures: Iterable[tuple[RequestId, SlipstreamError]]) -> None:
        """What one engine step did, request by request; all of it is in the outboxes when this returns."""
        for events, timing, prompt in tokens:
            if job := self._jobs.get(events[0].request):
                try:
                    self._role.on_tokens(job, events, timing, prompt)
                except Exception:
                    logger.exception("a token could not be handled", extra={"request_id": str(job)})
                    job.abandon(InternalError("a fault on this replica ended the request"))
        for id, error in failures:
            if job := self._jobs.get(id):
                level = logging.INFO if isinstance(error, PreemptedError) else logging.ERROR
                logger.log(level, "the engine ended a request: %s", error, extra={"request_id": str(job)})
                job.abandon(error)

    def abandon_all(self, error: Callable[[], SlipstreamError]) -> None:
        """Give up every job."""
        for job in list(self._jobs.values()):
            job.abandon(error())

    async def drain(self, timeout_seconds: float) -> int:
        """Refuse new jobs and wait for the running ones; those left at the end are cut off, and counted."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.idle.wait()
        except TimeoutError:
            cut_off = sum(not job.told for job in self._jobs.values())
            self.abandon_all(lambda: UnavailableError("this replica stopped before the request ended; send it again"))
            await self.idle.wait()
            return cut_off
        return 0


def _outcome(work: asyncio.Task[None]) -> SlipstreamError | None:
    """Why work that has ended by itself did not end well; a fault of ours is logged."""
    error = work.exception()
    if error is None or isinstance(error, SlipstreamError):
        if isinstance(error, InternalError):
            logger.error("a request failed: %s", error, exc_info=error)
        elif isinstance(error, InvalidRequestError):  # its text may quote the request
            logger.info("a request was refused: %s", error.code, extra={"field": error.field})
        elif error is not None:
            logger.info("a request failed: %s: %s", error.code, error)
        return error
    logger.error("a request failed by a fault of this process", exc_info=error)
    return InternalError(f"a fault on this replica ended the request: {type(error).__name__}")
