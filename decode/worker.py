"""One request on a decode replica: room, the prompt's state, then tokens to the end. Knows no gRPC.

Ledger: a reservation owns the landing from `admit` on. Nothing writes into it once `CacheLoader.load` has ended, however it
ended; `clean_up` runs after that and returns what is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from cache_transfer.handoff import Handoff
from cache_transfer.load import CacheLoader, Loaded
from cache_transfer.regions import Landing
from decode.admission import Admission, Busy, Need
from slipstream.engine.engine import Engine, Reservation
from slipstream.engine.sequence import Matcher, Timing
from slipstream.errors import BusyError, ProtocolError, SlipstreamError
from slipstream.types import TokenEvent
from worker.gang import GangLoaded, GangLoader
from worker.jobs import Job, PromptDone
from worker.replica import Replica
from worker.turns import CacheLender

logger = logging.getLogger(__name__)


class DecodeWorker:
    """Implements `worker.jobs.RoleWorker`."""

    def __init__(self, replica: Replica, loader: CacheLoader | GangLoader, lender: CacheLender) -> None:
        """`lender`: of what is cached here."""
        self._replica = replica
        self._lender = lender
        self._loader = loader
        self._admission = Admission()  # the engine thread's
        self._closing: set[asyncio.Task[None]] = set()  # Done on its way to a source

    async def work(self, job: Job) -> None:
        """Until the last token."""
        if job.submit.cached:
            return await self._lender.work(job)
        matcher = await self._replica.matcher(job.request)
        if job.submit.local:
            await self._replica.call(lambda engine: self._begin(engine, job, matcher))
            await job.ended
            return
        loaded = await self._load(job)
        job.stats.kv_bytes, job.stats.state_bytes = loaded.kv_bytes, loaded.state_bytes
        job.stats.transfer_seconds = loaded.seconds
        job.stats.cached_tokens = loaded.handoff.cached_tokens
        job.observer.landed(job.stats)
        goes_on = False
        try:
            goes_on = await self._commit(job, loaded.handoff, matcher)
        finally:
            closing = asyncio.create_task(loaded.close(committed=goes_on or loaded.handoff.finished))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if goes_on:
            await job.ended

    async def _load(self, job: Job) -> Loaded | GangLoaded:
        """Bring the prompt's state here. Raises BusyError with the reason and the time of admission."""
        busy: list[Busy] = []

        async def admit(num_tokens: int) -> Landing | None:
            told = len(job.request.tokens) + len(job.request.output)
            if num_tokens != told:
                raise ProtocolError(f"prefill computes {num_tokens} tokens, the router told {told}")
            answer = await self._replica.call(lambda engine: self._reserve(engine, job))
            if isinstance(answer, Busy):
                busy.append(answer)
                return None
            return Landing(blocks=answer.blocks, state_slot=answer.state_slot, have_tokens=answer.have_tokens)

        submit = job.submit
        try:
            return await self._loader.load(
                submit.prefill_addresses, transfer_id=submit.transfer_id, attempt=submit.attempt,
                source_epoch=submit.prefill_epoch, request_id=job.request.id.name,
                remaining_seconds=job.deadline - asyncio.get_running_loop().time(), admit=admit)
        except BusyError as error:
            if not busy:
                raise
            raise BusyError(busy[0].reason, retry_after_seconds=busy[0].retry_after_seconds) from error

    def _begin(self, engine: Engine, job: Job, matcher: Matcher | None) -> None:
        """On the engine thread: queue a prompt that is computed here. Raises BusyError if it would have to wait for memory
        behind what runs and what is queued: another replica may have it. Each running sequence keeps a block to grow into."""
        load, now, name, config = engine.load(), time.monotonic(), job.submit.transfer_id, self._replica.config.engine
        choices, slots = len(job.request.choices), engine.slots_of_choice
        need = Need(blocks=engine.demand(job.request), slots=choices * slots)
        busy, ahead = self._admission.ask(name, need, load, now), load.running + load.waiting
        blocks = need.blocks + load.running + -(-load.waiting_tokens // config.block_size)
        full = ahead + choices > config.max_running or blocks > load.free_blocks or (
            load.total_state_slots and need.slots + load.waiting * slots > load.free_state_slots)
        if busy is None and ahead and full:
            busy = self._admission.refused(name, need, load, now)
        if busy is not None:
            raise BusyError(busy.reason, retry_after_seconds=busy.retry_after_seconds)
        engine.submit(job.request, matcher=matcher)
        self._admission.admitted(name)

    def _reserve(self, engine: Engine, job: Job) -> Reservation | Busy:
        """On the engine thread: decide and take at once, so that nobody comes between."""
        load, now, name = engine.load(), time.monotonic(), job.submit.transfer_id
        need = Need(blocks=engine.demand(job.request), slots=len(job.request.choices) * engine.slots_of_choice)
        if busy := self._admission.ask(name, need, load, now):
            return busy
        reservation = engine.reserve(job.request)
        if reservation is None:
            return self._admission.refused(name, need, load, now)
        self._admission.admitted(name)
        return reservation

    async def _commit(self, job: Job, handoff: Handoff, matcher: Matcher | None) -> bool:
        """Start decoding; False if the first tokens ended every choice."""
        told = tuple(choice.choice for choice in handoff.choices)
        if told != job.request.choices:
            raise ProtocolError(f"prefill hands over choices {told}, the router told {job.request.choices}")
        if handoff.finished:
            job.finish(handed_off=False)
            return False
        await self._replica.call(lambda engine: engine.commit(
            job.request.id, first_tokens=[choice.first_token for choice in handoff.choices], mrope=handoff.mrope,
            matcher=matcher))
        return True

    async def clean_up(self, job: Job, error: SlipstreamError | None) -> None:
        """Return what the engine still holds for the job."""
        if job.submit.cached:
            return await self._lender.clean_up(job, error)

        def end(engine: Engine) -> None:
            engine.abort(job.request.id)
            self._admission.ended(job.submit.transfer_id, time.monotonic())

        await self._replica.call(end)

    def on_tokens(self, job: Job, events: Sequence[TokenEvent], timing: Timing | None, prompt: PromptDone | None) -> None:
        """The second token of each choice and those after it; of a prompt that was computed here, all."""
        for event in events:
            job.token(event)
        if timing is None:
            return
        job.stats.compute_seconds = timing.compute_seconds
        if job.submit.local:
            job.stats.queue_seconds, job.stats.cached_tokens = timing.queue_seconds, timing.cached_tokens
        job.finish(handed_off=False)
        if not job.ended.done():
            job.ended.set_result(None)
