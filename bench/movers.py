"""Ways to move a job's bytes from one process to another: the limits, the peers, and our channels with everything around them.

Each has a source half (`listen`, `offer`) and a destination half (`connect`, `move`); a process uses one of the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np

from bench.pool import BLOCK_SIZE, Job, Pool
from cache_transfer import spans
from cache_transfer.handoff import Handoff, HandoffChoice
from cache_transfer.load import CacheLoader
from cache_transfer.paths import open_paths
from cache_transfer.regions import Landing
from cache_transfer.store import CacheStore
from slipstream import typed
from slipstream.config import TransferConfig
from slipstream.errors import SlipstreamError
from slipstream.rpc.channel import connect
from slipstream.rpc.server import listen, new_server
from slipstream.types import MropeState, RequestId


class Mover(Protocol):
    """Implemented by each way."""

    async def listen(self) -> str:
        """Source: serve; the address."""

    async def connect(self, address: str) -> None:
        """Destination: everything that is done once."""

    async def offer(self, job: Job, name: str) -> None:
        """Source: the job may be moved now."""

    async def move(self, job: Job, name: str) -> None:
        """Destination: when this returns, the bytes are here."""


class Memcpy:
    """Block by block inside the destination: the limit of one host. Its source is a second pool there."""

    def __init__(self, pool: Pool, transfer: dict[str, Any]) -> None:
        self._pool = pool

    async def listen(self) -> str:
        """Nothing is served."""
        return "nowhere"

    async def connect(self, address: str) -> None:
        """Make the second pool."""
        self._other = Pool(self._pool.memory.regions[0].slots, len(self._pool.memory.regions))

    async def offer(self, job: Job, name: str) -> None:
        """Nothing."""

    def prepare(self, job: Job) -> None:
        """Fill it."""
        self._other.fill(job.table("source"))

    async def move(self, job: Job, name: str) -> None:
        """As large pieces as there are: neighbours on both sides are one copy."""
        ours, theirs = spans.paired(self._pool.spans(job.table("destination")), self._other.spans(job.table("source")))
        copy = ctypes.memmove
        for (target, size), source in zip(ours.tolist(), theirs[:, 0].tolist(), strict=True):
            copy(target, source, size)


class Tcp:
    """One plain socket: scattered blocks are sent and received by one system call for each MiB, without another copy."""

    GROUP_BYTES = 1 << 20

    def __init__(self, pool: Pool, transfer: dict[str, Any]) -> None:
        self._pool = pool
        self._views: dict[tuple[Job, str], list[list[memoryview]]] = {}

    async def listen(self) -> str:
        """A thread that answers each byte with a job."""
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return str(self._server.getsockname()[1])

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            for group in self._groups(self._job, "source"):
                _transfer_all(connection.sendmsg, group)

    async def connect(self, address: str) -> None:
        """One connection for all jobs."""
        self._connection = socket.create_connection(("127.0.0.1", int(address)))

    async def offer(self, job: Job, name: str) -> None:
        """The next byte asks for this one."""
        self._job = job
        self._groups(job, "source")

    async def move(self, job: Job, name: str) -> None:
        """Ask and receive."""
        self._connection.sendall(b"g")
        for group in self._groups(job, "destination"):
            _transfer_all(lambda views: self._connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0], group)

    def _groups(self, job: Job, side: str) -> list[list[memoryview]]:
        if (job, side) not in self._views:
            views = list(spans.views(spans.of(*self._pool.pieces(job.table(side)))))
            step = max(1, self.GROUP_BYTES // len(views[0]))
            self._views[job, side] = [views[i : i + step] for i in range(0, len(views), step)]
        return self._views[job, side]


def _transfer_all(call: Any, views: Sequence[memoryview]) -> None:
    views = list(views)
    while views:
        done = call(views)
        if done <= 0:
            raise ConnectionError("the other side closed the connection")
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]


class UnaryPerBlock:
    """One unary RPC for each block of each layer, one after the other, raw bytes: what a first design does."""

    def __init__(self, pool: Pool, transfer: dict[str, Any]) -> None:
        self._pool = pool

    async def listen(self) -> str:
        """Serve."""
        async def get(request: bytes, context: Any) -> bytes:
            return ctypes.string_at(*struct.unpack("<QQ", request))

        self._server = new_server()
        handler: Any = grpc.unary_unary_rpc_method_handler(get)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Unary", {
            "Get": handler, "Bases": grpc.unary_unary_rpc_method_handler(self._bases)}),))
        return await listen(self._server, "127.0.0.1:0")

    async def _bases(self, request: bytes, context: Any) -> bytes:
        return np.array([region.base for region in self._pool.memory.regions], np.uint64).tobytes()

    async def connect(self, address: str) -> None:
        """Connect, and learn where the source's tensors lie."""
        self._channel = connect(address)
        bases: Any = self._channel.unary_unary("/bench.Unary/Bases")
        self._bases_there = np.frombuffer(await bases(b""), np.uint64).tolist()

    async def offer(self, job: Job, name: str) -> None:
        """Nothing."""

    async def move(self, job: Job, name: str) -> None:
        """One by one."""
        get: Any = self._channel.unary_unary("/bench.Unary/Get")
        size = self._pool.memory.regions[0].slot_bytes
        there = [base + block * size for base in self._bases_there for block in job.table("source")]
        for (target, _), source in zip(self._pool.pieces(job.table("destination")), there, strict=True):
            ctypes.memmove(target, await get(struct.pack("<QQ", source, size)), size)


class Product:
    """CacheStore and CacheLoader with one channel: Hello, Open, ranges, checksums, coverage, Handoff, Done."""

    def __init__(self, pool: Pool, transfer: dict[str, Any]) -> None:
        self._pool = pool
        self._config = typed.build(TransferConfig, transfer, "transfer", "the bench")
        self._close: Any = None

    async def listen(self) -> str:
        """Serve a CacheStore."""
        paths = open_paths(self._config, self._pool.memory.extent, process="source", lands=False)
        self._store = CacheStore(self._pool.memory, paths, replica_id="p0", epoch=1, rank=0, config=self._config)
        self._server = new_server()
        self._store.add_to(self._server)
        return await listen(self._server, "127.0.0.1:0")

    async def connect(self, address: str) -> None:
        """Make a CacheLoader."""
        self._address = address
        paths = open_paths(self._config, self._pool.memory.extent, process="destination")
        self._loader = CacheLoader(self._pool.memory, paths, replica_id="d0", epoch=1, rank=0, config=self._config)

    async def offer(self, job: Job, name: str) -> None:
        """A prompt that is computed."""
        tokens = job.blocks * BLOCK_SIZE
        transfer = self._store.expect(name, RequestId(name="bench"), tokens, _Silent())
        transfer.begin(0)
        transfer.allocated(job.table("source"), None, 0)
        for layer in range(job.layers):
            transfer.layer_done(layer, tokens, True)
        transfer.finish(Handoff(request_id="bench", prompt_tokens=tokens, state_token_count=tokens,
                                choices=(HandoffChoice(first_token=1),), mrope=MropeState(delta=0, last_position=(0, 0, 0))))

    async def move(self, job: Job, name: str) -> None:
        """Load it."""
        async def admit(num_tokens: int) -> Landing:
            return Landing(blocks=job.table("destination"), state_slot=None)

        loaded = await self._loader.load([self._address], transfer_id=name, attempt=0, source_epoch=1, request_id="bench",
                                         remaining_seconds=60.0, admit=admit)
        await loaded.close(committed=True)


class _Silent:
    def ready(self) -> None: ...

    def parked(self, reason: str) -> None: ...

    def done(self, committed: bool) -> None: ...

    def failed(self, error: SlipstreamError) -> None:
        raise error


class Bare:
    """The channel alone: its payloads on a stream of their own, nothing around them."""

    def __init__(self, pool: Pool, transfer: dict[str, Any]) -> None:
        self._pool = pool
        config = typed.build(TransferConfig, transfer, "transfer", "the bench")
        paths = open_paths(config, pool.memory.extent, process="bare")
        self._channel = paths.way(config.channel, b"").channel

    async def listen(self) -> str:
        """Serve jobs."""
        self._server = new_server()
        handler: Any = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", {"Move": handler}),))
        self._from = self._channel.address()
        return await listen(self._server, "127.0.0.1:0") + "|" + self._from.hex()

    async def _serve(self, requests: AsyncIterator[bytes], context: Any) -> None:
        for part in self._parts(self._job.table("source")):
            await context.write(b"".join(await self._channel.send(b"", part, spans.EMPTY)))

    async def connect(self, address: str) -> None:
        """Connect."""
        where, _, origin = address.partition("|")
        self._origin, self._connection = bytes.fromhex(origin), connect(where)

    async def offer(self, job: Job, name: str) -> None:
        """The next stream asks for this one."""
        self._job = job

    async def move(self, job: Job, name: str) -> None:
        """Land what comes."""
        call: Any = self._connection.stream_stream("/bench.Bare/Move")()
        for part in self._parts(job.table("destination")):
            self._channel.land(self._origin, memoryview(await call.read()), part)
        with contextlib.suppress(asyncio.CancelledError):
            call.cancel()

    def _parts(self, table: tuple[int, ...]) -> list[spans.Spans]:
        pieces, step = spans.of(*self._pool.pieces(table)), max(1, self._channel.frame_bytes // self._pool.piece)
        return [spans.joined([pieces[i : i + step]]) for i in range(0, len(pieces), step)]


MOVERS: dict[str, type[Any]] = {"memcpy": Memcpy, "tcp": Tcp, "unary": UnaryPerBlock, "product": Product, "bare": Bare}
