"""One prompt on its way out: what is final, what has been sent, who holds it. Knows no gRPC server.

Ledger: from `allocated` until its terminal event the transfer may read the prompt's blocks and slot; after `done` or `failed`
it never does again, so the owner frees them then and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc
import grpc.aio

from cache_transfer import frames
from cache_transfer.channels.base import Channel
from cache_transfer.coverage import Coverage
from cache_transfer.frames import Range
from cache_transfer.handoff import Handoff
from cache_transfer.layout import Kind, TensorSpec
from cache_transfer.memory import CacheMemory, Landing
from slipstream.errors import (
    DeadlineError,
    InternalError,
    LeaseExpiredError,
    ProtocolError,
    SlipstreamError,
    TransferError,
    by_code,
)
from slipstream.v1 import cache_store_pb2 as pb

logger = logging.getLogger(__name__)

_LOST = "the destination was lost"
_LAST_WORD_SECONDS = 1.0
"""How long a stream may take to tell its destination that the transfer has failed."""

Write = Callable[[bytes], Awaitable[None]]
Read = Callable[[], Awaitable[bytes | None]]
"""The next frame; None: the destination has nothing more to say."""
Reader = asyncio.Task[pb.Control | None]
"""Waits for the destination's next word."""


class _LeftError(Exception):
    """The destination ended its side before the transfer was complete; the text is for `parked`."""


class TransferListener(Protocol):
    """Is told, on the event loop, what becomes of a transfer. Exactly one of `done` and `failed` comes, once, at the end."""

    def ready(self) -> None:
        """The destination takes the bytes as they come."""

    def parked(self, reason: str) -> None:
        """The destination was busy or is lost; the prompt waits under its lease."""

    def done(self, committed: bool) -> None:
        """The destination has what it needs."""

    def failed(self, error: SlipstreamError) -> None:
        """Given up: by `fail`, by the destination, or by the lease."""


class SourceTransfer:
    """Implements the engine's Publisher: those three methods may come from any thread, all else stays on the loop."""

    def __init__(self, transfer_id: str, request_id: str, num_tokens: int, memory: CacheMemory, channel: Channel,
                 listener: TransferListener, *, lease_seconds: float, frame_bytes: int,
                 on_end: Callable[[SourceTransfer], None]) -> None:
        self.transfer_id = transfer_id
        self.request_id = request_id
        self.attempt = -1
        self._num_tokens = num_tokens
        self._memory = memory
        self._path = channel
        self._listener = listener
        self._lease_seconds = lease_seconds
        self._frame_bytes = frame_bytes
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._begun: int | None = None
        self._where: Landing | None = None
        self._final = [0] * len(memory.layout.tensors)
        self._by_layer: dict[int, list[tuple[int, TensorSpec]]] = {}
        for number, spec in enumerate(memory.layout.tensors):
            self._by_layer.setdefault(spec.layer, []).append((number, spec))
        self._handoff: Handoff | None = None
        self._error: SlipstreamError | None = None
        self._over = False
        self._holder: asyncio.Task[None] | None = None
        self._lease = self._loop.call_later(lease_seconds, self._lease_over)

    # The engine's Publisher: any thread -------------------------------------------------------------------------------

    def begin(self, cached_tokens: int) -> None:
        """The scheduler reached the prompt, so much of which is cached."""
        self._begun = cached_tokens
        self._wake()

    def allocated(self, blocks: tuple[int, ...], state_slot: int | None, cached_tokens: int) -> None:
        """Where the prompt lies on this rank; its KV rows [0, cached_tokens) are final."""
        self._where = Landing(blocks=blocks, state_slot=state_slot)
        for number, spec in enumerate(self._memory.layout.tensors):
            if spec.kind is Kind.KV:
                self._final[number] = cached_tokens
        self._wake()

    def layer_done(self, layer: int, num_tokens: int, last_chunk: bool) -> None:
        """Rows [0, num_tokens) of the layer are final; its states are if this was the last chunk."""
        for number, spec in self._by_layer[layer]:
            if spec.kind is Kind.KV or last_chunk:
                self._final[number] = self._memory.layout.units(spec, num_tokens)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is going down
            self._loop.call_soon_threadsafe(self._changed.set)

    # The worker: on the loop ------------------------------------------------------------------------------------------

    def finish(self, handoff: Handoff) -> None:
        """The first tokens are drawn: what is left is sent, then the Handoff."""
        self._handoff = handoff
        self._changed.set()

    def fail(self, error: SlipstreamError) -> None:
        """Give up: `failed` comes before this returns, and the destination is told at once. Repeats do nothing.

        Memory is read between two awaits of the stream only, so nobody reads it now, and `serve` looks before it reads again.
        """
        if self._over:
            return
        self._error = error
        self._changed.set()
        if self._holder is not None:  # a destination that takes nothing must not keep the stream
            self._loop.call_later(_LAST_WORD_SECONDS, self._holder.cancel)
        self._end(lambda: self._listener.failed(error))

    @property
    def over(self) -> bool:
        """True after the terminal event."""
        return self._over

    @property
    def error(self) -> SlipstreamError | None:
        """Why it failed, if it did."""
        return self._error

    # The stream -------------------------------------------------------------------------------------------------------

    async def serve(self, opened: pb.Open, read: Read, write: Write) -> None:
        """Hold the transfer for one destination until it is done, busy, lost or superseded by a higher attempt."""
        if self._over:
            raise TransferError(f"transfer {self.transfer_id} has ended")
        if opened.attempt <= self.attempt:
            raise ProtocolError(f"transfer {self.transfer_id} was opened by attempt {self.attempt} already; attempt "
                                f"{opened.attempt} is too late")
        self.attempt = opened.attempt
        if (holder := self._holder) is not None:
            holder.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._holder = task
        self._lease.cancel()
        reason = _LOST
        try:
            async with asyncio.timeout(opened.remaining_ms / 1000):
                await self._converse(read, write)
        except TimeoutError:
            await self._give_up(task, DeadlineError("the deadline passed while the destination held the transfer"), write)
        except SlipstreamError as error:
            await self._give_up(task, error, write)
        except (_LeftError, grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            if isinstance(error, _LeftError):
                reason = str(error)
        except asyncio.CancelledError:
            if self._holder is task and not self._over:
                raise  # by the gRPC server: the stream broke
        except Exception as error:
            logger.exception("sending %s failed", self.transfer_id)
            await self._give_up(task, InternalError(f"sending the prompt's state failed: {error!r}"), write)
        finally:
            if self._holder is task:
                self._let_go(reason)

    async def _give_up(self, task: asyncio.Task[None], error: SlipstreamError, write: Write) -> None:
        """Fail, unless a higher attempt has taken over meanwhile, and tell the destination."""
        if self._holder is task:
            self.fail(error)
        await _say(write, self._error or error)

    def _let_go(self, reason: str) -> None:
        """Nobody holds the transfer any more: unless it is over it is parked under its lease."""
        self._holder = None
        if self._over:
            return
        self._lease = self._loop.call_later(self._lease_seconds, self._lease_over)
        self._listener.parked(reason)

    async def _converse(self, read: Read, write: Write) -> None:
        reader = asyncio.create_task(_control(read))
        try:
            await self._until(lambda: self._begun is not None, reader)
            await write(frames.control(begin=pb.Begin(num_tokens=self._num_tokens, cached_tokens=self._begun or 0,
                                                      num_layers=len(self._memory.layout.layers))))
            answer = await self._answer(reader)
            kind = answer.WhichOneof("message")
            if kind == "busy":
                raise _LeftError(f"the destination is busy: {answer.busy.reason}")
            if kind != "ready":
                raise ProtocolError(f"{kind} instead of Ready or Busy")
            coverage = Coverage(self._memory.layout, self._num_tokens, answer.ready.have_tokens)
            self._listener.ready()
            reader = asyncio.create_task(_control(read))
            await self._push(coverage, write, reader)
            answer = await self._answer(reader)
            if answer.WhichOneof("message") != "done":
                raise ProtocolError(f"{answer.WhichOneof('message')} instead of Done")
            committed = answer.done.committed
            self._end(lambda: self._listener.done(committed))
        finally:  # not awaited: that could swallow a cancel that is meant for this stream
            reader.cancel()
            reader.add_done_callback(lambda read: read.cancelled() or read.exception())

    async def _push(self, coverage: Coverage, write: Write, reader: Reader) -> None:
        """Send what is final as it becomes final, until the Handoff is out."""
        while True:
            handoff = self._handoff
            if handoff is not None and (handoff.finished or coverage.complete):
                await write(frames.control(handoff=frames.handoff_to_pb(handoff)))
                await write(frames.control(sent=pb.Sent(kv_bytes=coverage.kv_bytes, state_bytes=coverage.state_bytes,
                                                        digest=coverage.digest())))
                return
            ranges = self._next(coverage)
            if not ranges:
                await self._until(lambda seen=handoff: bool(self._next(coverage)) or self._handoff is not seen, reader)  # type: ignore[misc]
                continue
            self._raise_if_failed()
            assert self._where is not None
            coverage.add(ranges, self._memory, self._where)
            await write(self._path.pack(self._memory, self._where, ranges))
            self._raise_if_failed()

    def _next(self, coverage: Coverage) -> list[Range]:
        """The next frame's ranges: final units that were not sent, whole blocks while the prompt still grows."""
        ranges: list[Range] = []
        room = self._frame_bytes
        for number, spec in enumerate(self._memory.layout.tensors):
            final, sent = self._final[number], coverage.done[number]
            if spec.kind is Kind.KV:
                if final < self._num_tokens:
                    final -= final % self._memory.layout.block_size
                size = self._memory.layout.block_size
                most = max(size, room // spec.unit_bytes // size * size)
                units, cost = min(final - sent, most), spec.unit_bytes
            else:
                units, cost = min(final - sent, room), 1
            if units <= 0:
                continue
            ranges.append(Range(number, sent, units))
            room -= units * cost
            if room <= 0:
                break
        return ranges

    async def _until(self, condition: Callable[[], bool], reader: Reader) -> None:
        """Wait until `condition` holds. Raises what ended the transfer instead, the destination's word included."""
        while True:
            self._raise_if_failed()
            self._changed.clear()
            if condition():
                return
            await self._change_or(reader)
            if reader.done():
                self._raise_if_failed()
                raise ProtocolError(f"{_word(reader).WhichOneof('message')} in the middle of a transfer")

    async def _answer(self, reader: Reader) -> pb.Control:
        """The destination's next word. Raises _LeftError, or the transfer's failure if that comes first."""
        while not reader.done():
            self._raise_if_failed()
            self._changed.clear()
            await self._change_or(reader)
        self._raise_if_failed()
        return _word(reader)

    async def _change_or(self, reader: Reader) -> None:
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait((changed, reader), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _lease_over(self) -> None:
        if self._holder is None:
            self.fail(LeaseExpiredError(f"no decode replica took the prompt within {self._lease_seconds} s",
                                        retry_after_seconds=1.0))

    def _end(self, tell: Callable[[], None]) -> None:
        self._over = True
        self._lease.cancel()
        self._on_end(self)
        tell()


async def _control(read: Read) -> pb.Control | None:
    frame = await read()
    if frame is None:
        return None
    parsed = frames.parse(frame)
    if isinstance(parsed, tuple):
        raise ProtocolError("data from the destination of a transfer")
    return parsed


def _word(reader: Reader) -> pb.Control:
    """What a reader that is done has read. Raises _LeftError, or what the destination failed of."""
    answer = reader.result()
    if answer is None:
        raise _LeftError(_LOST)
    if answer.WhichOneof("message") == "failed":
        raise by_code(answer.failed.code, answer.failed.message)
    return answer


async def _say(write: Write, error: SlipstreamError) -> None:
    # BaseError: the stream has ended, or a write on it that was cut off is still under way.
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        await write(frames.control(failed=pb.Failed(code=error.code, message=error.message)))
