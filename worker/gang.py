"""Rank 0 of a replica of several ranks: its log, and transfers and landings of all ranks as if they were one. Knows no role.

A prompt that leaves is a SourceTransfer on every rank, told of by the log; rank 0's decides for all. A prompt that comes is a
load on every rank: rank 0 admits it, and it has come when each rank says so. Nothing returns to a pool before every rank has
said, or is bound by the order of the log, that it touches it no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cache_transfer.handoff import Handoff
from cache_transfer.load import Admit, CacheLoader, Loaded
from cache_transfer.regions import Landing
from cache_transfer.source import SourceTransfer, TransferListener
from cache_transfer.store import CacheStore
from slipstream.engine.log import Entry, Tokens
from slipstream.errors import GangError, SlipstreamError, by_code
from slipstream.types import RequestId
from worker.entries import (
    Allocated,
    CancelLoad,
    Close,
    EndLoad,
    Expect,
    Fail,
    Finish,
    Load,
    LoadEnded,
    Serving,
    Up,
)
from worker.link import Leader

logger = logging.getLogger(__name__)


class GangLog:
    """Implements `engine.gang.Log`; sorts what the other ranks say."""

    def __init__(self, leader: Leader[Any, Up], on_lost: Callable[[str], None]) -> None:
        """`on_lost`: called on another thread when a rank is lost; the process is to end."""
        self._leader = leader
        self._on_lost = on_lost
        self._tokens: queue.SimpleQueue[Tokens] = queue.SimpleQueue()
        self._serving: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.on_load_ended: Callable[[int, LoadEnded], None] = lambda rank, entry: None
        """(rank, entry), on another thread."""
        leader.start(self._heard, on_lost)

    @property
    def world(self) -> int:
        """Ranks of the replica."""
        return self._leader.world

    def append(self, entry: Entry) -> None:
        """See engine.gang.Log."""
        self._leader.append(entry)

    def next_tokens(self) -> Tokens:
        """See engine.gang.Log. A rank that is lost meanwhile ends the process."""
        return self._tokens.get()

    def addresses(self, timeout_seconds: float) -> list[str]:
        """Wait until every other rank serves: where, in the order of the ranks. Raises GangError."""
        found: dict[int, str] = {}
        while len(found) < self.world - 1:
            try:
                rank, address = self._serving.get(timeout=timeout_seconds)
            except queue.Empty:
                missing = sorted(set(range(1, self.world)) - found.keys())
                raise GangError(f"ranks {missing} did not serve within {timeout_seconds:.0f} s") from None
            found[rank] = address
        return [found[rank] for rank in range(1, self.world)]

    def close(self) -> None:
        """End the other ranks in order."""
        self._leader.close()

    def _heard(self, rank: int, entry: Up) -> None:
        match entry:
            case Tokens():
                self._tokens.put(entry)
            case Serving():
                self._serving.put((rank, entry.address))
            case LoadEnded():
                self.on_load_ended(rank, entry)


# Prompts that leave ---------------------------------------------------------------------------------------------------


class GangStore:
    """A CacheStore of all ranks."""

    def __init__(self, local: CacheStore, log: GangLog) -> None:
        self._local = local
        self._log = log

    def refuse(self, transfer_id: str, error: SlipstreamError) -> None:
        """See CacheStore: rank 0 of a destination asks rank 0 first."""
        self._local.refuse(transfer_id, error)

    def expect(self, transfer_id: str, request: RequestId, num_tokens: int, listener: TransferListener) -> GangTransfer:
        """See CacheStore."""
        transfer = GangTransfer(self._log, transfer_id, listener)
        transfer.local = self._local.expect(transfer_id, request, num_tokens, transfer)
        self._log.append(Expect(transfer_id=transfer_id, request=request, num_tokens=num_tokens))
        return transfer


class GangTransfer:
    """A SourceTransfer of all ranks; listens to rank 0's own."""

    local: SourceTransfer

    def __init__(self, log: GangLog, transfer_id: str, listener: TransferListener) -> None:
        self._log = log
        self._id = transfer_id
        self._listener = listener

    # The engine's Publisher; what other ranks publish stands in the steps of the log

    def begin(self, cached_tokens: int) -> None:
        """See Publisher."""
        self.local.begin(cached_tokens)

    def allocated(self, blocks: tuple[int, ...], state_slot: int | None, cached_tokens: int) -> None:
        """See Publisher."""
        self._log.append(Allocated(transfer_id=self._id, blocks=blocks, state_slot=state_slot, cached_tokens=cached_tokens))
        self.local.allocated(blocks, state_slot, cached_tokens)

    def layer_done(self, layer: int, num_tokens: int, last_chunk: bool) -> None:
        """See Publisher."""
        self.local.layer_done(layer, num_tokens, last_chunk)

    def finish(self, handoff: Handoff) -> None:
        """See SourceTransfer."""
        self._log.append(Finish(transfer_id=self._id))
        self.local.finish(handoff)

    def fail(self, error: SlipstreamError) -> None:
        """See SourceTransfer."""
        self.local.fail(error)

    # TransferListener

    def ready(self) -> None:
        """See TransferListener."""
        self._listener.ready()

    def parked(self, reason: str) -> None:
        """See TransferListener."""
        self._listener.parked(reason)

    def done(self, committed: bool) -> None:
        """Every rank of the destination has what it needs: rank 0 of it says so last."""
        self._log.append(Close(transfer_id=self._id))
        self._listener.done(committed)

    def failed(self, error: SlipstreamError) -> None:
        """See TransferListener."""
        self._log.append(Fail(transfer_id=self._id, code=error.code, message=error.message))
        self._listener.failed(error)


# Prompts that come ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GangLoaded:
    """What Loaded is, of all ranks."""

    handoff: Handoff
    kv_bytes: int
    state_bytes: int
    seconds: float
    local: Loaded
    end: Callable[[bool], None]

    async def close(self, *, committed: bool) -> None:
        """Tell every rank of the source that its copy may go, through those that read from it."""
        self.end(committed)
        await self.local.close(committed=committed)


class GangLoader:
    """A CacheLoader of all ranks."""

    def __init__(self, local: CacheLoader, log: GangLog) -> None:
        self._local = local
        self._log = log
        self._numbers = itertools.count(1)
        self._waiting: dict[int, dict[int, asyncio.Future[LoadEnded]]] = {}
        loop = asyncio.get_running_loop()

        def heard(rank: int, entry: LoadEnded) -> None:
            loop.call_soon_threadsafe(self._heard, rank, entry)

        log.on_load_ended = heard

    async def load(self, addresses: Sequence[str], *, transfer_id: str, attempt: int, source_epoch: int, request_id: str,
                   remaining_seconds: float, admit: Admit) -> GangLoaded:
        """See CacheLoader. When it has ended no rank writes into the landing any more."""
        number = next(self._numbers)
        clock = asyncio.get_running_loop().time
        deadline = clock() + remaining_seconds
        ends: dict[int, asyncio.Future[LoadEnded]] = {}

        async def admit_all(num_tokens: int) -> Landing | None:
            landing = await admit(num_tokens)
            if landing is not None:
                ends.update({rank: asyncio.get_running_loop().create_future() for rank in range(1, self._log.world)})
                self._waiting[number] = ends
                self._log.append(Load(
                    number=number, addresses=tuple(addresses), transfer_id=transfer_id, attempt=attempt,
                    source_epoch=source_epoch, request_id=request_id, remaining_seconds=deadline - clock(),
                    num_tokens=num_tokens, blocks=landing.blocks, state_slot=landing.state_slot,
                    have_tokens=landing.have_tokens))
                for end in ends.values():
                    end.add_done_callback(lambda end: None if end.cancelled() or not end.result().code else own.cancel())
            return landing

        own = asyncio.create_task(self._local.load(
            addresses, transfer_id=transfer_id, attempt=attempt, source_epoch=source_epoch, request_id=request_id,
            remaining_seconds=remaining_seconds, admit=admit_all))
        loaded: Loaded | None = None
        try:
            try:
                loaded = await own
            except asyncio.CancelledError:
                self._raise_first(ends)  # a rank has failed, and rank 0's part was given up for that
                raise
            told = await asyncio.gather(*ends.values())
            self._raise_first(ends)
        except BaseException:
            await self._give_up(number, own, ends, loaded)
            raise
        finally:
            self._waiting.pop(number, None)
        return GangLoaded(handoff=loaded.handoff, kv_bytes=loaded.kv_bytes + sum(one.kv_bytes for one in told),
                          state_bytes=loaded.state_bytes + sum(one.state_bytes for one in told),
                          seconds=max([loaded.seconds, *(one.seconds for one in told)]), local=loaded,
                          end=lambda committed: self._log.append(EndLoad(number=number, committed=committed)))

    async def _give_up(self, number: int, own: asyncio.Task[Loaded], ends: dict[int, asyncio.Future[LoadEnded]],
                       loaded: Loaded | None) -> None:
        """Stop every rank's part, and wait until none of them writes any more."""
        own.cancel()
        if ends:
            self._log.append(CancelLoad(number=number))
        pending: set[asyncio.Future[Any]] = {own, *ends.values()}
        while pending:  # whoever cancels us again has to wait as well: others own the memory after this
            with contextlib.suppress(asyncio.CancelledError):
                _, pending = await asyncio.wait(pending)
        if ends:
            self._log.append(EndLoad(number=number, committed=False))
        if loaded is not None:
            await loaded.close(committed=False)

    def _heard(self, rank: int, entry: LoadEnded) -> None:
        end = self._waiting.get(entry.number, {}).get(rank)
        if end is not None and not end.done():
            end.set_result(entry)

    @staticmethod
    def _raise_first(ends: dict[int, asyncio.Future[LoadEnded]]) -> None:
        for rank, end in ends.items():
            if end.done() and not end.cancelled() and end.result().code:
                raise by_code(end.result().code, f"rank {rank}: {end.result().message}")
