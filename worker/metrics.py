"""A worker's metrics: how its legs are counted, and the small HTTP server that shows them. Knows no role's work.

The server answers `GET /metrics` and nothing else, on the event loop; connections and their time are bounded, so that a client
that stalls costs nothing else. It ends with the loop.
"""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from slipstream.observability.metrics import CONTENT_TYPE
from slipstream.observability.worker_metrics import WorkerMetrics
from slipstream.rpc.server import bound, join_address, split_address
from slipstream.v1 import worker_pb2 as pb

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
"""At once; further ones are closed unanswered."""
ANSWER_SECONDS = 5.0
"""From the connection to the last byte of the answer."""
MAX_HEAD_BYTES = 8192


class LegMetrics:
    """Implements `worker.jobs.Observer`."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def landed(self, stats: pb.LegStats) -> None:
        """Count the transfer."""
        self._metrics.transfer_landed(stats.transfer_seconds, kv_bytes=stats.kv_bytes, state_bytes=stats.state_bytes)

    def ended(self, outcome: str, stats: pb.LegStats) -> None:
        """Count the leg."""
        self._metrics.leg_ended(outcome, queue_seconds=stats.queue_seconds, compute_seconds=stats.compute_seconds)


class MetricsServer:
    """One registry over HTTP."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._open = 0

    async def listen(self, address: str) -> str:
        """Bind (port 0: any free one); the address with its port. Raises ConfigError naming the address when it is taken."""
        listener = bound(address, "--metrics-listen")
        self._server = await asyncio.start_server(self._answer, sock=listener, limit=MAX_HEAD_BYTES)
        return join_address(split_address(address)[0], listener.getsockname()[1])

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                async with asyncio.timeout(ANSWER_SECONDS):
                    writer.write(self._reply(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            logger.debug("a client of the metrics was too slow, said too much, or left")
        finally:
            self._open -= 1
            writer.transport.abort()

    def _reply(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _response("404 Not Found", "text/plain", b"metrics are at /metrics\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", "text/plain", b"only GET\n", "allow: GET\r\n")
        return _response("200 OK", CONTENT_TYPE, generate_latest(self._registry))


def _response(status: str, kind: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
    return head.encode() + body


def metrics_target(listen: str, wanted: str | None) -> str:
    """Where metrics are served: `wanted`, or beside `listen` if that is None; empty: nowhere. Raises ConfigError."""
    if wanted is None:
        return join_address(split_address(listen)[0], 0)
    if wanted:
        split_address(wanted)
    return wanted


def reachable(bound: str, listen: str, address: str) -> str:
    """What others are told of metrics on `bound`: on the host that the worker listens on (`listen`), that of its `address`."""
    host, port = split_address(bound)
    beside = host in ("0.0.0.0", "::", split_address(listen)[0])
    return join_address(split_address(address)[0] if beside else host, port)
