"""What is cached of a prompt, on its way from one replica's prefix cache to another's: the two legs of a `cached` Submit. They
are a hand-off that computes nothing and draws no token. Knows no role and no gRPC.

Ledger: the lender's engine holds the blocks and a copy of the states until the transfer is over; the borrower's holds the
landing until nothing writes there any more. `clean_up` runs after that, and returns what is left.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cache_transfer.handoff import Handoff, HandoffChoice
from cache_transfer.load import CacheLoader
from cache_transfer.regions import Landing
from cache_transfer.source import SourceTransfer
from cache_transfer.store import CacheStore
from slipstream.errors import CancelledError, SlipstreamError, TransferError, UnavailableError
from slipstream.types import MropeState, RequestId
from worker.gang import GangLoader, GangStore, GangTransfer
from worker.jobs import Job
from worker.replica import Replica

NOTHING = "nothing of the prompt is cached here that could be lent now"
_FREE = HandoffChoice(first_token=0)
"""A Handoff names a choice; here nobody looks at it, nor at positions."""


@dataclass(kw_only=True)
class _Lent:
    transfer: SourceTransfer | GangTransfer | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """The transfer reads no more."""


class CacheLender:
    """The source's side: what is cached at once, until it was taken."""

    def __init__(self, replica: Replica, store: CacheStore | GangStore) -> None:
        self._replica = replica
        self._store = store
        self._lent: dict[RequestId, _Lent] = {}

    async def work(self, job: Job) -> None:
        """Until the destination has it. Raises UnavailableError if nothing is cached, or can be held, now."""
        lent, id, name = _Lent(), job.request.id, job.submit.transfer_id
        self._lent[id] = lent
        found = await self._replica.call(lambda engine: engine.lend(job.request))
        if found is None:
            refusal = UnavailableError(NOTHING)
            self._store.refuse(name, refusal)
            raise refusal
        tokens = found.have_tokens
        transfer = lent.transfer = self._store.expect(name, id, tokens, _Listener(job, lent.over))
        transfer.begin(tokens)
        transfer.allocated(found.blocks, found.state_slot, tokens)
        transfer.finish(Handoff(request_id=id.name, prompt_tokens=tokens, state_token_count=tokens, choices=(_FREE,),
                                mrope=MropeState(delta=0, last_position=(0, 0, 0)), cached_tokens=tokens))
        await lent.over.wait()
        job.finish(handed_off=True)

    async def clean_up(self, job: Job, error: SlipstreamError | None) -> None:
        """End the transfer, then let go of what it read."""
        lent = self._lent.pop(job.request.id, None)
        if lent is not None and lent.transfer is not None:
            lent.transfer.fail(error or CancelledError("the request is over"))
            await lent.over.wait()
        await self._replica.call(lambda engine: engine.abort(job.request.id))


class _Listener:
    """Implements `cache_transfer.source.TransferListener` for one job."""

    def __init__(self, job: Job, over: asyncio.Event) -> None:
        self._job = job
        self._over = over

    def ready(self) -> None:
        """The destination takes the bytes."""

    def parked(self, reason: str) -> None:
        """Nobody comes a second time for what can be computed."""
        self._job.abandon(TransferError(f"what is cached was not taken: {reason}"))

    def done(self, committed: bool) -> None:
        """The destination has it, or does not want it."""
        self._over.set()
        if not committed:
            self._job.abandon(TransferError("the other replica gave up what it was to load"))

    def failed(self, error: SlipstreamError) -> None:
        """Given up."""
        self._over.set()
        self._job.abandon(error)


class CacheBorrower:
    """The destination's side: room, the bytes, then they are the prefix cache's."""

    def __init__(self, replica: Replica, loader: CacheLoader | GangLoader) -> None:
        self._replica = replica
        self._loader = loader

    async def work(self, job: Job) -> None:
        """Until they are. Raises BusyError if there is no room for them, and what made the transfer fail."""
        id, submit = job.request.id, job.submit

        async def admit(num_tokens: int) -> Landing | None:
            landing = await self._replica.call(lambda engine: engine.borrow(job.request, num_tokens))
            if landing is None:
                return None
            return Landing(blocks=landing.blocks, state_slot=landing.state_slot, have_tokens=landing.have_tokens)

        loaded = await self._loader.load(
            submit.prefill_addresses, transfer_id=submit.transfer_id, attempt=submit.attempt,
            source_epoch=submit.prefill_epoch, request_id=id.name,
            remaining_seconds=job.deadline - asyncio.get_running_loop().time(), admit=admit)
        kept = False
        try:
            job.stats.cached_tokens = await self._replica.call(lambda engine: engine.keep(id))
            kept = True
        finally:
            await loaded.close(committed=kept)
        stats = job.stats
        stats.kv_bytes, stats.state_bytes, stats.transfer_seconds = loaded.kv_bytes, loaded.state_bytes, loaded.seconds
        job.observer.landed(stats)
        job.finish(handed_off=False)

    async def clean_up(self, job: Job, error: SlipstreamError | None) -> None:
        """Return the landing, if it is still there."""
        await self._replica.call(lambda engine: engine.abort(job.request.id))
