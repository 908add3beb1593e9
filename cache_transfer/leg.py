"""One Transfer stream as its destination holds it: words out, frames in, and the certainty that the source has stopped writing.

On a channel where the source writes into this rank's memory, its last word or the end of its stream in order says that it has
stopped. A stream that ends any other way says nothing: then the channel's fence must be up before the memory is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from cache_transfer import frames
from cache_transfer.links import Link
from cache_transfer.paths import Way
from cache_transfer.record import StreamRecord
from slipstream.errors import SlipstreamError, StalledError, TransferError, by_code
from slipstream.v1 import cache_store_pb2 as pb

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""A stream outlives its deadline by so much, so that its source can still say that it has stopped."""
_LET_GO_SECONDS = 0.1
"""How long gRPC may take to let go of a stream that was cancelled; a write from before its metadata were sent it never does."""
_HEARD_SECONDS = 1.0
"""Longest wait for a source to have heard our last word."""
_LOOK_SECONDS = 0.02
"""How long a source that writes here is read on, before our last word, to see whether it has ended."""
_AGAIN_SECONDS = 1.0
"""Between two tries of a fence."""


class Leg:
    """Reads and writes survive the cancellation of who waits for them: gRPC would cancel the whole stream with it."""

    def __init__(self, link: Link, seconds: float, record: StreamRecord) -> None:
        """Open a stream for so long."""
        self.record = record
        self.way: Way = link.way
        self.address = link.way.channel.address()
        """Ours on the channel, as the source is told."""
        self.invited = False
        """The source may write into the landing ..."""
        self.over = False
        """... until it says that it has stopped."""
        self._call = link.transfer(seconds + GRACE_SECONDS)
        self._turn = asyncio.Lock()  # gRPC takes one write at a time
        self._reading: asyncio.Future[object] | None = None
        self._parting: asyncio.Future[None] | None = None
        self._under_way: set[asyncio.Future[Any]] = set()  # what gRPC still works at

    async def write(self, word: bytes) -> None:
        """Raises AioRpcError or, if the stream has ended, TransferError; CancelledError if the source cut it off."""
        try:
            await asyncio.shield(self._kept(self._put(word)))
        except asyncio.InvalidStateError as error:
            raise TransferError("the source ended the Transfer") from error

    async def _put(self, word: bytes, *, last: bool = False) -> None:
        async with self._turn:
            await self._call.write(word)
            if last:
                await self._call.done_writing()

    async def read(self) -> bytes:
        """The next frame. Raises TransferError if the source ended the stream, else as `write`."""
        frame = await self._next()
        if not isinstance(frame, bytes):  # grpc's EOF marker
            raise TransferError(f"the source ended the Transfer before it was complete; {self.progress}")
        return frame

    @property
    def progress(self) -> str:
        """How much has come by now, for an error."""
        record = self.record
        total = "?" if record.total_bytes is None else record.total_bytes
        return (f"{record.kv_bytes + record.state_bytes} of {total} bytes had come {time.monotonic() - record.opened:.1f} s "
                "after it was opened")

    def failure(self, told: pb.Failed) -> SlipstreamError:
        """What the source failed of."""
        return by_code(told.code, f"{told.message}; {self.progress}" if told.code == StalledError.code else told.message)

    async def _next(self) -> object:
        if self._reading is None:
            self._reading = self._kept(self._call.read())
        frame = await asyncio.shield(self._reading)
        self._reading = None
        return frame

    async def part(self, last_word: bytes) -> None:
        """Say a last word, the first that is given, and wait a moment for the source to end the stream: a cancel on its heels
        could overtake the word.

        Never raises: a source that has left needs no telling.
        """
        try:
            async with asyncio.timeout(_HEARD_SECONDS):
                if self.invited and not self.over and await self._has_ended_already():
                    return
                if self._parting is None:
                    self._parting = self._kept(self._put(last_word, last=True))
                with contextlib.suppress(asyncio.InvalidStateError):  # the source has ended
                    await asyncio.shield(self._parting)
                self.over |= await self._ends_in_order()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            logger.info("the source left before it heard our last word: %r", error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise

    async def _has_ended_already(self) -> bool:
        """A look before a word: one that comes after the end makes gRPC forget how the stream ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                self.over |= await self._ends_in_order()
                return True
        return False

    async def _ends_in_order(self) -> bool:
        """Read what is left: only then does gRPC tell how the stream ended."""
        try:
            while isinstance(await self._next(), bytes):
                pass
        except grpc.aio.AioRpcError:
            return False
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return False
        return await self._call.code() is grpc.StatusCode.OK

    async def end(self) -> None:
        """End it, whatever the source says, and wait until gRPC has let go of it."""
        self._call.cancel()
        if self._under_way:
            await asyncio.wait(tuple(self._under_way), timeout=_LET_GO_SECONDS)
        for future in tuple(self._under_way):
            future.cancel()

    def _kept(self, work: Awaitable[T]) -> asyncio.Future[T]:
        future = asyncio.ensure_future(work)
        self._under_way.add(future)
        future.add_done_callback(self._over_with)
        return future

    def _over_with(self, future: asyncio.Future[Any]) -> None:
        self._under_way.discard(future)
        if not future.cancelled():
            future.exception()  # who still waits for it hears it

    async def fenced(self, request_id: str) -> None:
        """Return when the source writes no more."""
        if not self.invited or self.over:
            return
        await self.part(frames.control(busy=pb.Busy(reason="it gave this attempt up")))
        if self.over:
            return
        self.record.quarantine(began := time.monotonic())
        logger.warning("the source of %s does not say that it has stopped writing; its memory is kept from use", request_id)
        fence = asyncio.create_task(self._fence())
        ended = asyncio.create_task(self._has_ended())
        await asyncio.wait((fence, ended), return_when=asyncio.FIRST_COMPLETED)
        for task in (fence, ended):
            task.cancel()
        logger.info("nothing writes for %s any more; its memory was kept for %.1f s", request_id, time.monotonic() - began)

    async def _fence(self) -> None:
        """One that fails proves nothing: it is tried again."""
        while True:
            try:
                return await self.way.channel.fence(self.way.peer, self.address)
            except Exception:
                logger.exception("channel %s cannot fence off a source; it is tried again", self.way.channel.name)
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _has_ended(self) -> None:
        if not await self._ends_in_order():
            await asyncio.Event().wait()  # that says nothing


async def quiet(legs: Sequence[Leg], users: Sequence[asyncio.Task[T]], request_id: str) -> None:
    """End these legs once their `users` have ended and no source writes any more, even if the caller is cancelled."""
    async def end() -> None:
        if users:
            await asyncio.wait(users)
        await asyncio.gather(*(leg.fenced(request_id) for leg in legs))
        await asyncio.gather(*(leg.end() for leg in legs))

    ending = asyncio.create_task(end())
    while not ending.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(ending)


def is_cancelled() -> bool:
    """True if somebody cancels this task: grpc raises CancelledError too when it was the peer who cancelled the stream."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
