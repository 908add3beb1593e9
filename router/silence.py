"""Reads a Session until its worker falls silent. Knows no message's meaning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from slipstream.errors import UnavailableError
from slipstream.v1 import worker_pb2


async def unless_silent(call: grpc.aio.StreamStreamCall[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
                         seconds: float) -> AsyncIterator[worker_pb2.WorkerMessage]:
    """The call's messages. Raises UnavailableError after `seconds` without one.

    Counted in ticks of this process, so that a stall of the router itself is not taken for silence.
    """
    tick, silent = seconds / 10, 0
    reading = asyncio.ensure_future(call.read())
    try:
        while True:
            await asyncio.wait({reading}, timeout=tick)
            if not reading.done():
                silent += 1
                if silent >= 10:
                    raise UnavailableError(f"nothing was heard from it for {seconds:g} s", retry_after_seconds=1.0)
                continue
            silent, message = 0, reading.result()
            if not isinstance(message, worker_pb2.WorkerMessage):  # grpc's EOF marker
                return
            reading = asyncio.ensure_future(call.read())
            yield message
    finally:
        reading.cancel()
