"""One prompt's way to one destination rank: Begin, Ready, bytes as they become final, Sent, Done. Knows no other rank.

Memory is read between two awaits only, and each time after a look at whether the prompt was given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from cache_transfer import frames, invitation, spans
from cache_transfer.channels.base import LostError
from cache_transfer.coverage import Coverage
from cache_transfer.handoff import Handoff
from cache_transfer.invitation import Invitation
from cache_transfer.layout import Kind, Range, TensorSpec
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import Way
from cache_transfer.pipeline import Pipeline
from cache_transfer.record import StreamRecord
from cache_transfer.regions import Landing
from slipstream.errors import ProtocolError, SlipstreamError, by_code
from slipstream.v1 import cache_store_pb2 as pb

DESTINATION_LOST = "the destination was lost"

Write = Callable[[bytes], Awaitable[None]]
Read = Callable[[], Awaitable[bytes | None]]
"""The next frame; None: the destination has nothing more to say."""
Reader = asyncio.Task[pb.Control | None]
"""Waits for the destination's next word."""


class BusyPeerError(LostError):
    """The destination said so: it has no memory, or has given this attempt up."""


class Prompt:
    """What the streams of one prompt have in common: where it lies on this rank, and what of it is final."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.begun: int | None = None
        """Cached tokens, once the scheduler reached the prompt."""
        self.where: Landing | None = None
        self.complete = False
        """The first tokens are drawn: all there is to send will be final without another step."""
        self.handoff: Handoff | None = None
        """On rank 0, once complete."""
        self.error: SlipstreamError | None = None
        """Why it was given up."""
        self._cached = 0
        self._rows: dict[int, int] = {}  # by layer
        self._states: set[int] = set()  # layers

    def place(self, where: Landing, cached_tokens: int) -> None:
        """It lies here, and its KV rows [0, cached_tokens) are final; of one that is cached whole the states are, too."""
        self.where, self._cached, self._rows = where, cached_tokens, {}

    def layer_done(self, layer: int, num_tokens: int, last_chunk: bool) -> None:
        """Rows [0, num_tokens) of the layer are final; its states are if this was the last chunk."""
        self._rows[layer] = num_tokens
        if last_chunk:
            self._states.add(layer)

    def final(self, spec: TensorSpec) -> int:
        """Units of a tensor, or of a stream's part of it, that will not change any more."""
        if spec.kind is Kind.KV:
            return self._rows.get(spec.layer, self._cached)
        return spec.unit_bytes if spec.layer in self._states or self._cached == self.num_tokens else 0

    def raise_if_failed(self) -> None:
        """Raise why it was given up, if it was."""
        if self.error is not None:
            raise self.error


class Stream:
    """Made in the task that serves it."""

    def __init__(self, prompt: Prompt, memory: CacheMemory, way: Way, *, leads: bool, checksum: bool, stall_seconds: float,
                 read: Read, write: Write, on_ready: Callable[[], None], record: StreamRecord) -> None:
        """`memory`: narrowed to what this stream carries. `leads`: it joins the ranks 0, so it carries the Handoff.
        `stall_seconds`: longest wait for the destination to take one frame."""
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[None] = task
        self.changed = asyncio.Event()
        """Set whenever the prompt has changed."""
        self.ready = False
        self.over = False
        """Set by who serves it: this side has said its last word."""
        self.committed: bool | None = None
        """What the destination said with Done."""
        self._prompt = prompt
        self._memory = memory
        self._way = way
        self._leads = leads
        self._checksum = checksum
        self._pipeline = Pipeline(way.channel.depth, write, stall_seconds)
        self._invited: Invitation | None = None
        self._read = read
        self._write = write
        self._on_ready = on_ready
        self._record = record

    def cut(self) -> None:
        """Cancel the task that serves it, unless it is over."""
        if not self.over:
            self.task.cancel()

    async def converse(self) -> None:
        """Until the destination has said Done. Raises LostError, or what ended the prompt or the conversation instead."""
        prompt = self._prompt
        reader = self._listen()
        try:
            await self._until(lambda: prompt.begun is not None, reader)
            cached = prompt.begun or 0 if self._leads else 0
            await self._write(frames.control(begin=pb.Begin(num_tokens=prompt.num_tokens, cached_tokens=cached,
                                                            num_layers=len(self._memory.layout.layers))))
            self._record.begun = time.monotonic()
            answer = await self._answer(reader)
            kind = answer.WhichOneof("message")
            if kind != "ready":
                raise ProtocolError(f"{kind} instead of Ready or Busy")
            coverage = Coverage(self._memory, prompt.num_tokens, answer.ready.have_tokens)
            if self._way.channel.direct:
                self._invited = invitation.from_pb(answer.ready.invitation, self._memory.regions)
            self.ready = True
            self._record.ready, self._record.coverage = time.monotonic(), coverage
            self._on_ready()
            reader = self._listen()
            await self._push(coverage, reader)
            answer = await self._answer(reader)
            if answer.WhichOneof("message") == "landed":  # the prompt is held still, or this would have raised
                reader = self._listen()
                await self._write(_sent(coverage))
                answer = await self._answer(reader)
            if answer.WhichOneof("message") != "done":
                raise ProtocolError(f"{answer.WhichOneof('message')} instead of Done")
            self.committed = answer.done.committed
        finally:
            reader.cancel()  # not awaited: that could swallow a cancel that is meant for this stream
            reader.add_done_callback(lambda read: read.cancelled() or read.exception())
            await self._pipeline.settle()

    async def _push(self, coverage: Coverage, reader: Reader) -> None:
        """Send what is final as it becomes final, until Sent is out."""
        prompt = self._prompt
        while True:
            complete, handoff = prompt.complete, (prompt.handoff if self._leads else None)
            if complete and (coverage.complete or (handoff is not None and handoff.finished)):
                await self._drain(coverage)
                if handoff is not None:
                    await self._write(frames.control(handoff=frames.handoff_to_pb(handoff)))
                await self._write(_sent(coverage))
                return
            ranges = self._next(coverage)
            if not ranges:
                await self._drain(coverage)
                await self._until(lambda seen=complete: bool(self._next(coverage)) or prompt.complete is not seen, reader)  # type: ignore[misc]
                continue
            prompt.raise_if_failed()
            coverage.add(ranges)
            if self._record.first_byte is None:
                self._record.first_byte = time.monotonic()
            await self._send(ranges)
            prompt.raise_if_failed()
            if reader.done():
                raise _interruption(reader)

    async def _send(self, ranges: list[Range]) -> None:
        assert self._prompt.where is not None
        source = self._memory.spans(self._prompt.where, ranges)
        target = spans.EMPTY if self._invited is None else self._invited.spans(ranges)
        header = frames.data_header(ranges, spans.checksum(source) if self._checksum else None)
        await self._pipeline.add(header, self._way.channel.send(self._way.peer, source, target))

    async def _drain(self, coverage: Coverage) -> None:
        """All that was sent is told."""
        await self._pipeline.drain()
        if self._record.last_byte is None and coverage.kv_bytes + coverage.state_bytes == coverage.total_bytes:
            self._record.last_byte = time.monotonic()
        self._prompt.raise_if_failed()

    def _next(self, coverage: Coverage) -> list[Range]:
        """The next frame's ranges: final units that were not sent, whole blocks while the prompt still grows."""
        ranges: list[Range] = []
        room = self._way.channel.frame_bytes
        for number, spec in enumerate(self._memory.tensors):
            final, sent = self._prompt.final(spec), coverage.done[number]
            if spec.kind is Kind.KV:
                size = self._memory.block_size
                if final < self._prompt.num_tokens:
                    final -= final % size
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

    def _listen(self) -> Reader:
        return asyncio.create_task(_control(self._read))

    async def _until(self, condition: Callable[[], bool], reader: Reader) -> None:
        """Wait until `condition` holds. Raises what ended the transfer instead, the destination's word included."""
        while True:
            self._prompt.raise_if_failed()
            self.changed.clear()
            if condition():
                return
            await self._change_or(reader)
            if reader.done():
                self._prompt.raise_if_failed()
                raise _interruption(reader)

    async def _answer(self, reader: Reader) -> pb.Control:
        """The destination's next word. Raises LostError, or the transfer's failure if that comes first."""
        while not reader.done():
            self._prompt.raise_if_failed()
            self.changed.clear()
            await self._change_or(reader)
        self._prompt.raise_if_failed()
        return _word(reader)

    async def _change_or(self, reader: Reader) -> None:
        changed = asyncio.create_task(self.changed.wait())
        try:
            await asyncio.wait((changed, reader), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()


async def _control(read: Read) -> pb.Control | None:
    frame = await read()
    if frame is None:
        return None
    parsed = frames.parse(frame)
    if isinstance(parsed, frames.Data):
        raise ProtocolError("data from the destination of a transfer")
    return parsed


def _sent(coverage: Coverage) -> bytes:
    return frames.control(sent=pb.Sent(kv_bytes=coverage.kv_bytes, state_bytes=coverage.state_bytes))


def _interruption(reader: Reader) -> ProtocolError:
    """What a word in the middle of a transfer is. Raises as `_word`: all that a destination can say then."""
    return ProtocolError(f"{_word(reader).WhichOneof('message')} in the middle of a transfer")


def _word(reader: Reader) -> pb.Control:
    """What a reader that is done has read. Raises LostError, or what the destination failed of."""
    answer = reader.result()
    if answer is None:
        raise LostError(DESTINATION_LOST)
    if answer.WhichOneof("message") == "failed":
        raise by_code(answer.failed.code, answer.failed.message)
    if answer.WhichOneof("message") == "busy":
        raise BusyPeerError(f"the destination is busy: {answer.busy.reason}")
    return answer
