"""One router's stream: Submits and Cancels in, one StepReport per engine step out. Knows no role and no engine.

A (handle, attempt) gets exactly one end: Finished or Failed. What it wrote is merged while the stream is slow, so that unsent
output is bounded by the tokens of the running requests and `MAX_UNREAD` ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

from slipstream.engine.sequence import GenerationRequest
from slipstream.errors import CancelledError, InternalError, InvalidRequestError, SlipstreamError
from slipstream.rpc import convert
from slipstream.types import RequestId, Role, TokenEvent
from slipstream.v1 import worker_pb2 as pb
from worker.feed import CacheFeed, CacheWatch
from worker.jobs import Job, Jobs

logger = logging.getLogger(__name__)

REMEMBERED = 4096
"""Ended or cancelled (handle, attempt) pairs that a session keeps in mind."""
MAX_UNREAD = 4096
"""Ends of legs that a router may leave unread; no more of it is read before it reads them."""

Key = tuple[int, int]


class Session:
    """The requests of one connected router. Lives on the asyncio thread."""

    def __init__(self, role: Role, jobs: Jobs, load: Callable[[], pb.Load], feed: CacheFeed | None = None) -> None:
        """`load`: the replica's load, to go with each report. `feed`: of its prefix cache, for a router that watches."""
        self._role = role
        self._jobs = jobs
        self._load = load
        self._feed = CacheFeed() if feed is None else feed
        self._watch: CacheWatch | None = None
        self._running: dict[Key, Job] = {}
        self._past: OrderedDict[Key, bool] = OrderedDict()  # True: cancelled before it came
        self._report = pb.StepReport()
        self._something = asyncio.Event()
        self._read = asyncio.Event()
        self._ending = False

    # In ----------------------------------------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait while too much is unread: what a router sends must not pile up here as answers that it never fetches."""
        while len(self._report.failed) + len(self._report.finished) >= MAX_UNREAD:
            self._read.clear()
            await self._read.wait()

    def receive(self, message: pb.RouterMessage) -> None:
        """Carry out one message. Never raises: a bad message fails its own request."""
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(message.submit)
        elif kind == "cancel":
            self._cancel((message.cancel.handle, message.cancel.attempt))
        elif kind == "watch_cache":
            self._unwatch()
            self._watch = self._feed.watch()
            self._something.set()
        else:
            logger.warning("a router sent a message that this version does not know; update the older side")

    def _submit(self, submit: pb.Submit) -> None:
        key = (submit.handle, submit.attempt)
        try:
            if key in self._running:
                raise InvalidRequestError(f"handle {submit.handle} attempt {submit.attempt} runs already", field="handle")
            if key in self._past:
                if self._past[key]:
                    self._past[key] = False
                    raise CancelledError("the request was cancelled before it came")
                raise InvalidRequestError(f"handle {submit.handle} attempt {submit.attempt} was used before", field="handle")
            job = make_job(submit, self._role, self)
            self._jobs.start(job)
            self._running[key] = job
            return
        except SlipstreamError as error:
            refusal = error
        except Exception as error:
            logger.exception("a Submit could not be handled", extra={"request_id": submit.request_id})
            refusal = InternalError(f"a fault on this replica refused the request: {type(error).__name__}")
        if key not in self._running:
            self._remember(key, cancelled=False)  # a Cancel that is on its way changes nothing any more
        self.failed(convert.failed_to_pb(*key, refusal))
        self._jobs.observer.ended(refusal.code, pb.LegStats())

    def _cancel(self, key: Key) -> None:
        if job := self._running.get(key):
            job.abandon(CancelledError("the router cancelled the request"))
        elif key not in self._past:
            self._remember(key, cancelled=True)
            self.failed(convert.failed_to_pb(*key, CancelledError("the request was cancelled before it came")))

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def close(self) -> None:
        """The router is gone: give up its requests."""
        self._unwatch()
        for job in list(self._running.values()):
            job.abandon(CancelledError("the router's session ended"))

    # Out: what jobs say --------------------------------------------------------------------------------------------------

    def token(self, handle: int, attempt: int, event: TokenEvent) -> None:
        """A row of the next report."""
        report = self._report
        report.handle.append(handle)
        report.attempt.append(attempt)
        report.choice.append(event.choice)
        report.index.append(event.index)
        report.token.append(event.token)
        report.finish.append(convert.finish_to_pb(event.finish))
        if event.logprobs is not None:
            report.logprobs.append(convert.logprobs_to_pb(event.logprobs, len(report.token) - 1))
        if event.prompt is not None:
            report.prompt_logprobs.append(convert.prompt_logprobs_to_pb(event.prompt, len(report.token) - 1))
        self._something.set()

    def computed(self, message: pb.Finished) -> None:
        """Goes out with the next report."""
        self._report.computed.append(message)
        self._something.set()

    def finished(self, message: pb.Finished) -> None:
        """Goes out with the next report, after its tokens."""
        self._report.finished.append(message)
        self._something.set()

    def failed(self, message: pb.Failed) -> None:
        """Goes out with the next report."""
        self._report.failed.append(message)
        self._something.set()

    def over(self, handle: int, attempt: int) -> None:
        """The job is gone; its key stays used."""
        self._running.pop((handle, attempt), None)
        self._remember((handle, attempt), cancelled=False)

    def want_load(self) -> None:
        """Send the load even if there is nothing else to say."""
        self._something.set()

    def end(self) -> None:
        """Let the stream end once everything has been said."""
        self._ending = True
        self._something.set()

    async def next_message(self) -> pb.WorkerMessage | None:
        """Everything said since the last one, as soon as there is something; None after the last one."""
        await self._something.wait()
        self._something.clear()
        report, self._report = self._report, pb.StepReport()
        self._read.set()
        if watches := self._watch is not None and self._watch.waits:
            report.cache.CopyFrom(self._watch.next())
        if watches or report.handle or report.computed or report.finished or report.failed:
            report.load.CopyFrom(self._load())
            if self._ending or (self._watch is not None and self._watch.waits):
                self._something.set()
            return pb.WorkerMessage(step=report)
        if self._ending:
            return None
        return pb.WorkerMessage(load=self._load())

    def _remember(self, key: Key, *, cancelled: bool) -> None:
        self._past[key] = cancelled
        while len(self._past) > REMEMBERED:
            self._past.popitem(last=False)


def make_job(submit: pb.Submit, role: Role, outbox: Session) -> Job:
    """A job out of a Submit. Raises InvalidRequestError for what no replica of this role can serve."""
    if not submit.request_id or not submit.transfer_id:
        raise InvalidRequestError("a Submit needs a request_id and a transfer_id", field="request_id")
    if submit.local and (role is not Role.DECODE or submit.prefill_addresses or submit.images):
        raise InvalidRequestError("a local Submit is for a decode replica, and has neither prefill_addresses nor images",
                                  field="local")
    takes = submit.cached if role is Role.PREFILL else not (submit.cached or submit.local)
    if takes and not submit.prefill_addresses:
        raise InvalidRequestError(f"such a Submit to a {role.value} replica needs prefill_addresses", field="prefill_addresses")
    images = [convert.image_from_pb(image) for image in submit.images]
    request = GenerationRequest(
        id=RequestId(name=submit.request_id, attempt=submit.attempt), tokens=tuple(submit.tokens),
        grids=tuple(grid for _, grid in images), images=tuple(name for name, _ in images),
        sampling=convert.sampling_from_pb(submit.sampling), stop=convert.stop_from_pb(submit),
        choices=tuple(submit.choices) or (0,), output=tuple(submit.output), priority=submit.priority,
        cache_salt=submit.cache_salt, grammar=convert.grammar_from_pb(submit),
        prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None)
    return Job(submit, request, outbox, asyncio.get_running_loop().time() + submit.remaining_ms / 1000)
