"""Destination side: opens a Transfer, lands its bytes, verifies that nothing is missing. Knows no scheduler.

When `CacheLoader.load` has ended, however it ended, nothing writes into the landing any more: bytes are landed between two
awaits of the coroutine itself, so there is no other writer to wait for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from cache_transfer import frames
from cache_transfer.channels.base import Channel
from cache_transfer.coverage import Coverage
from cache_transfer.handoff import Handoff
from cache_transfer.links import IDLE_SECONDS, Call, Links
from cache_transfer.memory import CacheMemory, Landing
from slipstream.config import TransferConfig
from slipstream.errors import (
    BusyError,
    CoverageError,
    DeadlineError,
    IncompatibleError,
    InternalError,
    ProtocolError,
    SlipstreamError,
    TransferError,
    by_code,
)
from slipstream.v1 import cache_store_pb2 as pb

logger = logging.getLogger(__name__)

_HEARD_SECONDS = 1.0
"""Longest wait for a source to have heard our last word."""

Admit = Callable[[int], Awaitable[Landing | None]]
"""Prompt tokens -> where they may land, or None: no memory now."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A prompt whose bytes are here and verified. The source keeps its copy until `close`."""

    handoff: Handoff
    kv_bytes: int
    state_bytes: int
    seconds: float
    """From Begin to the last verified byte."""
    call: Call

    async def close(self, *, committed: bool) -> None:
        """Tell the source that its copy may go. Never raises: a source that died needs no telling."""
        await _part(self.call, frames.control(done=pb.Done(committed=committed)))


class CacheLoader:
    """One per rank."""

    def __init__(self, memory: CacheMemory, channel: Channel, *, replica_id: str, epoch: int, rank: int,
                 config: TransferConfig, idle_seconds: float = IDLE_SECONDS) -> None:
        """`idle_seconds`: after so long without use a connection to a source is closed."""
        self._memory = memory
        self._path = channel
        layout = memory.layout
        hello = pb.HelloRequest(replica_id=replica_id, epoch=epoch, rank=rank,
                                layout=pb.Layout(hash=layout.hash, fields=layout.fields()))
        self._links = Links(hello, layout, connect_seconds=config.connect_seconds, idle_seconds=idle_seconds)

    async def close(self) -> None:
        """Close every connection; loads that still run fail."""
        await self._links.close()

    async def load(self, addresses: Sequence[str], *, transfer_id: str, attempt: int, source_epoch: int, request_id: str,
                   remaining_seconds: float, admit: Admit) -> Loaded:
        """Bring a prompt's state here. `addresses`: the CacheStore of each source rank.

        Raises BusyError if `admit` gave None, DeadlineError, IncompatibleError, CoverageError, the error that the source names,
        or TransferError for a lost link. Cancelling it tells the source.
        """
        if len(addresses) != 1:
            raise IncompatibleError(f"the source has {len(addresses)} ranks; this destination reads from one")
        address = addresses[0]
        clock = asyncio.get_running_loop().time
        deadline = clock() + remaining_seconds
        late = "the deadline passed while the prompt's state was on its way"
        try:
            async with asyncio.timeout_at(deadline), self._links.use(address, source_epoch) as link:
                left = max(0.001, deadline - clock())
                opened = pb.Open(transfer_id=transfer_id, attempt=attempt, epoch=source_epoch, request_id=request_id,
                                 compatibility_hash=self._memory.layout.hash, remaining_ms=max(1, int(left * 1000)))
                return await self._transfer(link.transfer(left), opened, admit)
        except TimeoutError as error:
            raise DeadlineError(late) from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineError(late) from error
            raise TransferError(f"the Transfer from {address} broke: {error.code().name} {error.details()}") from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise TransferError(f"the source at {address} cut the Transfer off") from None

    async def _transfer(self, call: Call, opened: pb.Open, admit: Admit) -> Loaded:
        loaded: Loaded | None = None
        try:
            await call.write(frames.control(open=opened))
            loaded = await self._receive(call, admit)
            return loaded
        finally:
            if loaded is None:
                call.cancel()

    async def _receive(self, call: Call, admit: Admit) -> Loaded:
        begin = await self._expect(call, "begin")
        began = time.monotonic()
        num_tokens = begin.begin.num_tokens
        try:
            landing = await admit(num_tokens)
            if landing is None:
                await _part(call, frames.control(busy=pb.Busy(reason="no memory for the prompt and its output")))
                raise BusyError("the decode replica has no memory for this request now", retry_after_seconds=0.1)
            coverage = Coverage(self._memory.layout, num_tokens, landing.have_tokens)
            await call.write(frames.control(ready=pb.Ready(have_tokens=landing.have_tokens)))
            return await self._land(call, landing, coverage, began)
        except (grpc.aio.AioRpcError, BusyError):
            raise
        except Exception as error:
            told = error if isinstance(error, SlipstreamError) else InternalError(f"the destination failed: {error!r}")
            await _part(call, frames.control(failed=pb.Failed(code=told.code, message=told.message)))
            raise

    async def _land(self, call: Call, landing: Landing, coverage: Coverage, began: float) -> Loaded:
        handoff: Handoff | None = None
        while True:
            frame = frames.parse(await _read(call))
            if isinstance(frame, tuple):
                ranges, payload = frame
                coverage.check(ranges)
                self._path.land(self._memory, landing, ranges, payload)
                coverage.add(ranges, self._memory, landing)
                continue
            match frame.WhichOneof("message"):
                case "handoff" if handoff is None:
                    handoff = frames.handoff_from_pb(frame.handoff)
                case "failed":
                    raise by_code(frame.failed.code, frame.failed.message)
                case "sent":
                    self._verify(handoff, coverage, frame.sent)
                    assert handoff is not None
                    return Loaded(handoff=handoff, kv_bytes=coverage.kv_bytes, state_bytes=coverage.state_bytes,
                                  seconds=time.monotonic() - began, call=call)
                case other:
                    raise ProtocolError(f"{other} in the middle of a transfer")

    def _verify(self, handoff: Handoff | None, coverage: Coverage, sent: pb.Sent) -> None:
        if handoff is None:
            raise CoverageError("the transfer ended without a Handoff")
        if handoff.prompt_tokens != coverage.num_tokens or handoff.state_token_count != coverage.num_tokens:
            raise CoverageError(f"the Handoff is for {handoff.prompt_tokens} tokens with a state after "
                                f"{handoff.state_token_count}; the prompt has {coverage.num_tokens}")
        if not handoff.finished:  # a finished prompt's bytes are not needed, and may not all have been sent
            coverage.verify(sent.kv_bytes, sent.state_bytes, sent.digest)

    async def _expect(self, call: Call, kind: str) -> pb.Control:
        frame = frames.parse(await _read(call))
        if isinstance(frame, tuple):
            raise ProtocolError(f"data before {kind}")
        if frame.WhichOneof("message") == "failed":
            raise by_code(frame.failed.code, frame.failed.message)
        if frame.WhichOneof("message") != kind:
            raise ProtocolError(f"{frame.WhichOneof('message')} instead of {kind}")
        return frame


async def _read(call: Call) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):  # grpc's EOF marker
        raise TransferError("the source ended the Transfer before it was complete")
    return frame


async def _part(call: Call, last_word: bytes) -> None:
    """Say a last word, and wait a moment for the source to end the stream: a cancel on its heels could overtake the word.

    Never raises: a source that has left needs no telling.
    """
    try:
        async with asyncio.timeout(_HEARD_SECONDS):
            await call.write(last_word)
            await call.done_writing()
            while isinstance(await call.read(), bytes):
                pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
        logger.info("the source left before it heard our last word: %r", error)
    except asyncio.CancelledError:
        if _is_cancelled():
            raise


def _is_cancelled() -> bool:
    """True if somebody cancels this task: grpc raises CancelledError too when it was the peer who cancelled the stream."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
