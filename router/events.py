"""A response made of server-sent events, to a client that may leave or stop reading. Knows no request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
LINGER_SECONDS = 5.0
"""How long a client may take to read what was there when its request ended; then it is cut off."""


class EventStream(Response):
    """Sends what `events` yields. `close` is called once, as soon as no more will be sent."""

    def __init__(self, events: AsyncGenerator[bytes, None], *, ended: Callable[[], Awaitable[None]],
                 close: Callable[[], None]) -> None:
        """`ended` returns when the source of the events has ended, however slowly they are read."""
        super().__init__(headers=HEADERS)
        self._events = events
        self._ended = ended
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The whole response. One that was cut off stays incomplete, so the client sees that it broke."""
        sending = asyncio.create_task(self._send(send))
        others = [asyncio.create_task(_until_gone(receive)), asyncio.create_task(self._until_late())]
        try:
            await asyncio.wait((sending, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, *others):
                task.cancel()
            try:
                await asyncio.gather(sending, *others, return_exceptions=True)
                await self._events.aclose()
            finally:
                self._close()
        if not sending.cancelled():
            sending.result()  # a fault of ours is not swallowed

    async def _send(self, send: Send) -> None:
        # Starlette adds a length to a response of its own; this one has none.
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_late(self) -> None:
        await self._ended()
        await asyncio.sleep(LINGER_SECONDS)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
