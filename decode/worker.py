"""One request on a decode replica: room, the prompt's state, then tokens to the end. Knows no gRPC.

Ledger: a reservation owns the landing from `admit` on. Nothing writes into it once `CacheLoader.load` has ended, however it
ended; `clean_up` runs after that and returns what is left.
"""

from __future__ import annotations

import asyncio
import logging
import time

from cache_transfer.load import CacheLoader, Loaded
from cache_transfer.memory import Landing
from decode.admission import Admission, Busy, blocks_needed
from slipstream.engine.engine import Engine, Reservation
from slipstream.engine.sequence import Timing
from slipstream.errors import BusyError, ProtocolError, SlipstreamError
from slipstream.types import FinishReason, MropeState, TokenEvent
from worker.jobs import Job
from worker.replica import Replica

logger = logging.getLogger(__name__)


class DecodeWorker:
    """Implements `worker.jobs.RoleWorker`."""

    def __init__(self, replica: Replica, loader: CacheLoader) -> None:
        self._replica = replica
        self._loader = loader
        self._admission = Admission()  # the engine thread's
        self._closing: set[asyncio.Task[None]] = set()  # Done on its way to a source

    async def work(self, job: Job) -> None:
        """Until the last token."""
        loaded = await self._load(job)
        job.stats.kv_bytes, job.stats.state_bytes = loaded.kv_bytes, loaded.state_bytes
        job.stats.transfer_seconds = loaded.seconds
        job.stats.cached_tokens = loaded.handoff.cached_tokens
        goes_on = False
        try:
            goes_on = await self._commit(job, loaded)
        finally:
            closing = asyncio.create_task(loaded.close(committed=goes_on or loaded.handoff.finished))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if goes_on:
            await job.ended

    async def _load(self, job: Job) -> Loaded:
        """Bring the prompt's state here. Raises BusyError with the reason and the time of admission."""
        busy: list[Busy] = []

        async def admit(num_tokens: int) -> Landing | None:
            if num_tokens != len(job.request.tokens):
                raise ProtocolError(f"prefill computes {num_tokens} tokens, the router told {len(job.request.tokens)}")
            answer = await self._replica.call(lambda engine: self._reserve(engine, job))
            if isinstance(answer, Busy):
                busy.append(answer)
                return None
            return Landing(blocks=answer.blocks, state_slot=answer.state_slot)

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

    def _reserve(self, engine: Engine, job: Job) -> Reservation | Busy:
        """On the engine thread: decide and take at once, so that nobody comes between."""
        load, now = engine.load(), time.monotonic()
        replica, request = self._replica, job.request
        blocks = blocks_needed(len(request.tokens), request.stop.max_tokens, max_context=replica.max_context,
                               block_size=replica.config.engine.block_size)
        name = job.submit.transfer_id
        if busy := self._admission.ask(name, blocks, load, now):
            return busy
        reservation = engine.reserve(request)
        if reservation is None:
            return self._admission.refused(name, blocks, load, now)
        self._admission.admitted(name)
        return reservation

    async def _commit(self, job: Job, loaded: Loaded) -> bool:
        """Start decoding; False if the first token ended the request."""
        choice = loaded.handoff.choices[0]
        if choice.finished:
            stop = job.request.stop
            stopped = not stop.ignore_eos and choice.first_token in stop.stop_token_ids
            job.finish(FinishReason.STOP if stopped else FinishReason.LENGTH)
            return False
        await self._replica.call(lambda engine: engine.commit(job.request.id, first_tokens=[choice.first_token],
                                                              mrope=loaded.handoff.mrope))
        return True

    async def clean_up(self, job: Job, error: SlipstreamError | None) -> None:
        """Return what the engine still holds for the job."""
        def end(engine: Engine) -> None:
            engine.abort(job.request.id)
            self._admission.ended(job.submit.transfer_id, time.monotonic())

        await self._replica.call(end)

    def on_token(self, job: Job, event: TokenEvent, timing: Timing | None, mrope: MropeState | None) -> None:
        """Output 1 and up."""
        job.token(event)
        if event.finish is None:
            return
        if timing is not None:
            job.stats.compute_seconds = timing.compute_seconds
        job.finish(event.finish)
        if not job.ended.done():
            job.ended.set_result(None)
