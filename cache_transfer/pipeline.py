"""The frames of one stream whose bytes are under way: several at once where a channel can, each told after those before it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from cache_transfer.channels.base import Buffer, StuckError, UnsettledError

Send = Coroutine[Any, Any, Sequence[Buffer]]
"""A channel's `send`: the payload of its frame."""


class Pipeline:
    """Whoever makes one calls `settle` at the end, whatever happened."""

    def __init__(self, depth: int, write: Callable[[bytes], Awaitable[None]], stall_seconds: float) -> None:
        """`depth`: sends at once. `write`: puts a frame on the stream. `stall_seconds`: longest wait for one to be gone."""
        self._depth = depth
        self._write = write
        self._stall_seconds = stall_seconds
        self._under_way: deque[tuple[bytes, asyncio.Task[Sequence[Buffer]]]] = deque()

    async def add(self, header: bytes, send: Send) -> None:
        """Start one; returns when there is room for another. Raises LostError."""
        if self._depth == 1:  # memory that is not awaited here is read at once
            await self._in_time(self._sent(header, send))
            return
        self._under_way.append((header, asyncio.create_task(send)))
        while len(self._under_way) >= self._depth:
            await self._tell()

    async def drain(self) -> None:
        """Until all are told. Raises LostError."""
        while self._under_way:
            await self._tell()

    async def _tell(self) -> None:
        header, send = self._under_way[0]
        await self._in_time(self._sent(header, _waited(send)))
        self._under_way.popleft()

    async def _sent(self, header: bytes, send: Send) -> None:
        await self._write(b"".join((header, *await send)))

    async def _in_time(self, sent: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await sent
        except TimeoutError as error:
            raise StuckError(f"the transfer stalled: nothing moved for {self._stall_seconds:g} s") from error

    async def settle(self) -> None:
        """Give up what is under way and wait for that: the destination's memory is its until then. Raises UnsettledError."""
        sends, cancelled = [send for _, send in self._under_way], False
        for send in sends:
            send.cancel()
        while not all(send.done() for send in sends):
            try:
                await asyncio.wait(sends)
            except asyncio.CancelledError:
                cancelled = True
        errors = [send.exception() for send in sends if not send.cancelled()]
        for error in errors:
            if isinstance(error, UnsettledError):
                raise error
        if cancelled:
            raise asyncio.CancelledError


async def _waited(send: asyncio.Task[Sequence[Buffer]]) -> Sequence[Buffer]:
    """Whoever waits may be cancelled: the send goes on."""
    await asyncio.wait((send,))
    return send.result()
