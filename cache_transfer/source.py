"""One prompt on its way out of this rank: what becomes of it, which destination ranks take it. Knows no gRPC server.

Ledger: from `allocated` until its terminal event the transfer may read the prompt's blocks and slot; after `done` or `failed`
it never does again, so the owner frees them then and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from cache_transfer import frames, plan
from cache_transfer.channels.base import LostError, StuckError, UnsettledError
from cache_transfer.handoff import Handoff
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import Paths
from cache_transfer.record import BUSY, COMMITTED, CUT, DISCARDED, LOST, StreamRecord
from cache_transfer.regions import Landing
from cache_transfer.stream import DESTINATION_LOST, BusyPeerError, Prompt, Read, Stream, Write
from slipstream.config import TransferConfig
from slipstream.errors import (
    DeadlineError,
    IncompatibleError,
    InternalError,
    LeaseExpiredError,
    ProtocolError,
    SlipstreamError,
    StalledError,
    TransferError,
)
from slipstream.sharding import Geometry, Shard
from slipstream.v1 import cache_store_pb2 as pb

logger = logging.getLogger(__name__)

_LAST_WORD_SECONDS = 1.0
"""How long a stream may take to tell its destination that the transfer has failed."""


class TransferListener(Protocol):
    """Is told, on the event loop, what becomes of a transfer. Exactly one of `done` and `failed` comes, once, at the end."""

    def ready(self) -> None:
        """Every destination rank that reads from this one takes the bytes as they come."""

    def parked(self, reason: str) -> None:
        """One of them was busy or is lost, and so all were let go; the prompt waits under its lease."""

    def done(self, committed: bool) -> None:
        """They have what they need, or, not committed, one of them says that none needs it any more."""

    def failed(self, error: SlipstreamError) -> None:
        """Given up: by `fail`, by a destination rank, or by the lease."""


class SourceTransfer:
    """Implements the engine's Publisher: those three methods may come from any thread, all else stays on the loop.

    An attempt is the streams of one destination, one from each of its ranks that reads from this rank; they end together.
    """

    def __init__(self, transfer_id: str, request_id: str, num_tokens: int, memory: CacheMemory, paths: Paths,
                 listener: TransferListener, *, config: TransferConfig, on_end: Callable[[SourceTransfer], None]
                 ) -> None:
        self.transfer_id = transfer_id
        self.request_id = request_id
        self.attempt = -1
        self._memory = memory
        self._paths = paths
        self._listener = listener
        self._config = config
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._prompt = Prompt(num_tokens)
        self._streams: dict[int, Stream] = {}  # the attempt's, by destination rank
        self._to: Geometry | None = None  # the attempt's destination; None: the attempt is over, nobody can join it
        self._over = False
        self._committed: bool | None = None  # what its done said
        self._lease: asyncio.TimerHandle | None = None
        self._start_lease()

    # The engine's Publisher: any thread -------------------------------------------------------------------------------

    def begin(self, cached_tokens: int) -> None:
        """The scheduler reached the prompt, so much of which is cached."""
        self._prompt.begun = cached_tokens
        self._wake()

    def allocated(self, blocks: tuple[int, ...], state_slot: int | None, cached_tokens: int) -> None:
        """Where the prompt lies on this rank; its KV rows [0, cached_tokens) are final."""
        self._prompt.place(Landing(blocks=blocks, state_slot=state_slot), cached_tokens)
        self._wake()

    def layer_done(self, layer: int, num_tokens: int, last_chunk: bool) -> None:
        """Rows [0, num_tokens) of the layer are final; its states are if this was the last chunk.

        `layer`: its index in the checkpoint's list, on every rank.
        """
        self._prompt.layer_done(layer, num_tokens, last_chunk)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is going down
            self._loop.call_soon_threadsafe(self._changed)

    # The worker: on the loop ------------------------------------------------------------------------------------------

    def finish(self, handoff: Handoff | None = None) -> None:
        """The first tokens are drawn: what is left is sent, then, between the ranks 0, the Handoff; only rank 0 has one."""
        assert handoff is not None or self._memory.shard.rank > 0, "rank 0 hands over"
        self._prompt.handoff, self._prompt.complete = handoff, True
        self._changed()

    def fail(self, error: SlipstreamError) -> None:
        """Give up: `failed` comes before this returns, and the destination is told at once. Repeats do nothing.

        Memory is read between two awaits of a stream only, so nobody reads it now, and a stream looks before it reads again.
        """
        if self._over:
            return
        self._prompt.error = error
        self._changed()
        for stream in self._streams.values():  # a destination that takes nothing must not keep the stream
            if stream.committed is None:
                self._loop.call_later(_LAST_WORD_SECONDS, stream.cut)
        self._end(lambda: self._listener.failed(error))

    def close(self) -> None:
        """A follower: rank 0's transfer is done, so each of the destination's ranks has all it needs. `done` comes before this
        returns, though their Done may still be on its way, or will never come as nobody reads from this rank."""
        if not self._over:
            self._finish(committed=True)

    @property
    def over(self) -> bool:
        """True after the terminal event."""
        return self._over

    @property
    def error(self) -> SlipstreamError | None:
        """Why it failed, if it did."""
        return self._prompt.error

    # The streams ------------------------------------------------------------------------------------------------------

    async def serve(self, opened: pb.Open, read: Read, write: Write, record: StreamRecord) -> None:
        """Hold the transfer for one destination rank until all of them are done, or one is busy or lost, or a higher attempt
        supersedes them. `opened` names a rank that passed `plan.check`. Raises what the destination has to be told of this
        stream, or UnsettledError."""
        stream = self._join(opened, read, write, record)
        reason = DESTINATION_LOST
        end: StalledError | UnsettledError | None = None
        try:
            async with asyncio.timeout(opened.remaining_ms / 1000):
                await stream.converse()
        except TimeoutError:
            await self._give_up(stream, DeadlineError("the deadline passed while the destination held the transfer"), write)
        except SlipstreamError as error:
            await self._give_up(stream, error, write)
        except (LostError, grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            if isinstance(error, LostError):
                reason = str(error)
            if isinstance(error, BusyPeerError):
                record.outcome = BUSY
            if isinstance(error, StuckError):  # the prompt is well, but the destination has to hear of it
                end, record.outcome = StalledError(reason), StalledError.code
            elif isinstance(error, UnsettledError):
                end = error
        except asyncio.CancelledError:
            if self._holds(stream) and not self._over:
                raise  # by the gRPC server: the stream broke
        except Exception as error:
            logger.exception("sending %s failed", self.transfer_id)
            await self._give_up(stream, InternalError(f"sending the prompt's state failed: {error!r}"), write)
        finally:
            stream.over = True
            record.end(time.monotonic(), self._outcome(stream))
            if self._holds(stream) and not self._over:
                self._settle(stream, reason)
        if end is not None:
            raise end

    def _join(self, opened: pb.Open, read: Read, write: Write, record: StreamRecord) -> Stream:
        """Take a destination rank into its attempt. Raises what makes that impossible."""
        if self._over:
            raise TransferError(f"transfer {self.transfer_id} has ended")
        layout, here = self._memory.layout, self._memory.shard
        to = Shard(geometry=frames.geometry_from_pb(opened, len(layout.layers)), rank=opened.rank)
        copies = plan.plan(layout, here.geometry, to).get(here.rank)
        if copies is None:
            raise IncompatibleError(f"rank {to.rank} of {to.geometry} has nothing to read from rank {here.rank} of "
                                    f"{here.geometry}")
        if opened.attempt > self.attempt:
            self._cut()
            self.attempt, self._to = opened.attempt, to.geometry
            self._start_lease()
        elif opened.attempt < self.attempt or self._to is None or to.rank in self._streams:
            raise ProtocolError(f"transfer {self.transfer_id} was opened by attempt {self.attempt} already; attempt "
                                f"{opened.attempt} is too late")
        elif to.geometry != self._to:
            raise ProtocolError(f"attempt {self.attempt} at transfer {self.transfer_id} comes from {self._to}, and from "
                                f"{to.geometry}")
        way = self._paths.way(opened.channel, opened.address)
        record.channel = way.channel.name
        stream = self._streams[to.rank] = Stream(
            self._prompt, self._memory.narrowed([(copy.spec, copy.at_source) for copy in copies]),
            way, leads=here.rank == to.rank == 0, checksum=self._config.checksum, stall_seconds=self._config.stall_seconds,
            read=read, write=write, on_ready=self._is_ready, record=record)
        if to.rank == 0:
            self._end_lease()
        return stream

    def _outcome(self, stream: Stream) -> str:
        """Of a stream that ends now."""
        committed = self._committed if stream.committed is None else stream.committed
        if committed is not None:
            return COMMITTED if committed else DISCARDED
        if self.error is not None:
            return self.error.code
        return LOST if self._holds(stream) else CUT

    def _holds(self, stream: Stream) -> bool:
        return stream in self._streams.values()

    def _is_ready(self) -> None:
        if self._all_here() and all(stream.ready for stream in self._streams.values()):
            self._listener.ready()

    def _all_here(self) -> bool:
        assert self._to is not None
        return self._streams.keys() == plan.readers(self._memory.layout, self._memory.shard, self._to)

    async def _give_up(self, stream: Stream, error: SlipstreamError, write: Write) -> None:
        """Fail, unless a higher attempt has taken over meanwhile, and tell the destination."""
        if self._holds(stream):
            self.fail(error)
        # BaseError: the stream has ended, or a write on it that was cut off is still under way.
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            told = self._prompt.error or error
            await write(frames.control(failed=pb.Failed(code=told.code, message=told.message)))

    def _settle(self, stream: Stream, reason: str) -> None:
        """A stream has ended. With the last Done, or one that is not committed, the transfer is done; without, it is parked."""
        if stream.committed is None:
            self._cut()
            self._start_lease()
            self._listener.parked(reason)
        elif not stream.committed or (self._all_here() and all(other.committed for other in self._streams.values())):
            self._finish(committed=stream.committed)

    def _cut(self) -> None:
        """End the streams of an attempt, but for the one that calls and those that are done."""
        streams, self._streams, self._to = self._streams, {}, None
        for stream in streams.values():
            if stream.committed is None and stream.task is not asyncio.current_task():
                stream.cut()

    def _changed(self) -> None:
        for stream in self._streams.values():
            stream.changed.set()

    def _start_lease(self) -> None:
        """It runs while the destination's rank 0 is not here, and only on the rank 0 of this side: its word ends all ranks."""
        self._end_lease()
        if self._memory.shard.rank == 0:
            self._lease = self._loop.call_later(self._config.lease_seconds, self._lease_over)

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()

    def _lease_over(self) -> None:
        self.fail(LeaseExpiredError(f"no decode replica took the prompt within {self._config.lease_seconds} s",
                                    retry_after_seconds=1.0))

    def _finish(self, *, committed: bool) -> None:
        self._committed = committed
        self._cut()
        self._end(lambda: self._listener.done(committed))

    def _end(self, tell: Callable[[], None]) -> None:
        self._over = True
        self._end_lease()
        self._on_end(self)
        tell()
