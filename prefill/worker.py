"""One request on a prefill replica: pictures, prompt, first tokens, hand-off. Knows no gRPC.

Ledger: the engine owns the prompt's memory; once the transfer was told where it lies, it may be read until the transfer is
over. So `clean_up` ends the transfer first, waits until it is over, and only then gives the memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache_transfer.handoff import Handoff, HandoffChoice
from cache_transfer.source import SourceTransfer
from cache_transfer.store import CacheStore
from prefill.images import ImageStore
from slipstream.engine.sequence import Timing
from slipstream.errors import CancelledError, SlipstreamError, TransferError
from slipstream.rpc import convert
from slipstream.types import RequestId, TokenEvent
from worker.gang import GangStore, GangTransfer
from worker.jobs import FirstTokens, Job, PromptDone
from worker.replica import Replica
from worker.turns import CacheBorrower

logger = logging.getLogger(__name__)

FINISHED_SECONDS = 2.0
"""How long a prompt whose first tokens ended it waits for a destination."""
IMAGE_SECONDS = 15.0
"""Longest wait for a picture that a request names."""


@dataclass(kw_only=True)
class _Held:
    """What a job holds here beside its engine memory."""

    transfer: SourceTransfer | GangTransfer | None = None
    images: tuple[bytes, ...] = ()
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """The transfer reads no more."""


class PrefillWorker:
    """Implements `worker.jobs.RoleWorker`."""

    def __init__(self, replica: Replica, store: CacheStore | GangStore, images: ImageStore, borrower: CacheBorrower) -> None:
        """`borrower`: of what is cached elsewhere."""
        self._replica = replica
        self._borrower = borrower
        self._store = store
        self._images = images
        self._held: dict[RequestId, _Held] = {}

    async def work(self, job: Job) -> None:
        """Until the destination has committed, or the transfer failed."""
        if job.submit.cached:
            return await self._borrower.work(job)
        held = self._held[job.request.id] = _Held()
        listener = _Listener(self._replica, job, held.over)
        transfer = held.transfer = self._store.expect(job.submit.transfer_id, job.request.id, _length(job), listener)
        hashes = tuple(convert.image_from_pb(image)[0] for image in job.submit.images)
        pixels = await self._images.pin(hashes, IMAGE_SECONDS)
        held.images = hashes
        matcher = await self._replica.matcher(job.request)
        await self._replica.call(lambda engine: engine.submit(job.request, pixels, transfer, matcher))
        first = await job.first_tokens
        self._unpin(held)
        transfer.finish(_handoff(job, first))
        if not first.finished:
            await held.over.wait()
            job.finish(handed_off=True)
        elif not listener.is_parked:  # the answer is complete; give a destination that is on its way the time to hear of it
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(held.over.wait(), FINISHED_SECONDS)

    async def clean_up(self, job: Job, error: SlipstreamError | None) -> None:
        """End the transfer, then return the memory."""
        if job.submit.cached:
            return await self._borrower.clean_up(job, error)
        held = self._held.pop(job.request.id, None)
        if held is None:
            return
        self._unpin(held)
        if held.transfer is not None:
            held.transfer.fail(error or CancelledError("the request is over"))
            await held.over.wait()
        if error is None:
            await self._replica.call(lambda engine: engine.release(job.request.id))
        else:
            await self._replica.call(lambda engine: engine.abort(job.request.id))

    def on_tokens(self, job: Job, events: Sequence[TokenEvent], timing: Timing | None, prompt: PromptDone | None) -> None:
        """The first token of each choice, the only ones drawn here."""
        assert prompt is not None, "a prompt's first tokens come with what is known of it"
        first = FirstTokens(events=tuple(events), prompt=prompt)
        job.stats.cached_tokens = prompt.cached_tokens
        if timing is not None:
            job.stats.queue_seconds, job.stats.compute_seconds = timing.queue_seconds, timing.compute_seconds
        job.tell_stats()
        for event in events:
            job.token(event)
        if first.finished:
            job.finish(handed_off=False)
        if not job.first_tokens.done():
            job.first_tokens.set_result(first)

    def _unpin(self, held: _Held) -> None:
        hashes, held.images = held.images, ()
        self._images.unpin(hashes)


class _Listener:
    """Implements `cache_transfer.source.TransferListener` for one job."""

    def __init__(self, replica: Replica, job: Job, over: asyncio.Event) -> None:
        self._replica = replica
        self._job = job
        self._over = over
        self.is_parked = False

    def ready(self) -> None:
        """The destination takes the bytes as they come: this prompt holds no parked memory."""
        self.is_parked = False
        self._replica.tell(lambda engine: engine.mark_ready(self._job.request.id))

    def parked(self, reason: str) -> None:
        """No destination for now."""
        logger.info("parked: %s", reason, extra={"request_id": str(self._job)})
        self.is_parked = True
        if self._job.told:  # its first tokens ended it and nobody will come again for it
            self._job.abandon(CancelledError("the request is over"))
        self._replica.tell(lambda engine: engine.mark_parked(self._job.request.id))

    def done(self, committed: bool) -> None:
        """The destination has what it needs, or says that it needs nothing."""
        self._over.set()
        if not committed:
            self._job.abandon(TransferError("the decode replica gave up the request"))

    def failed(self, error: SlipstreamError) -> None:
        """Given up; the router hears why."""
        self._over.set()
        self._job.abandon(error)


def _length(job: Job) -> int:
    """Tokens whose state travels: the prompt, and in a resumed request its output so far."""
    return len(job.request.tokens) + len(job.request.output)


def _handoff(job: Job, first: FirstTokens) -> Handoff:
    choices = tuple(HandoffChoice(choice=event.choice, first_token=event.token, finished=event.finish is not None)
                    for event in first.events)
    return Handoff(request_id=job.request.id.name, prompt_tokens=_length(job), state_token_count=_length(job),
                   mrope=first.prompt.mrope, cached_tokens=first.prompt.cached_tokens, choices=choices)
