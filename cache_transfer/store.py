"""Source side: the CacheStore service. Finds the prompt that a destination asks for; knows no engine.

A destination may come before the prompt does (the router tells both sides at once): it waits for a bounded time. A prompt that
was given up before its destination came leaves a tombstone, so that the destination hears of it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from cache_transfer import frames, plan
from cache_transfer.channels.base import UnsettledError
from cache_transfer.frames import SERVICE
from cache_transfer.layout import differences
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import Paths
from cache_transfer.record import LOST, SEND, StreamRecord
from cache_transfer.source import SourceTransfer, TransferListener
from cache_transfer.transfers import Transfers
from slipstream.config import TransferConfig
from slipstream.errors import IncompatibleError, InvalidRequestError, ProtocolError, SlipstreamError, TransferError
from slipstream.sharding import Shard
from slipstream.types import RequestId
from slipstream.v1 import cache_store_pb2 as pb

logger = logging.getLogger(__name__)

_TOMBSTONES = 4096

Context = grpc.aio.ServicerContext[bytes, bytes]


class _Reader:
    """A stream's requests, for whoever may be cancelled while it waits for one: the next to read gets it."""

    def __init__(self, requests: AsyncIterator[bytes]) -> None:
        self._requests = requests
        self._next: asyncio.Future[bytes | None] | None = None

    async def read(self) -> bytes | None:
        """None: the destination has nothing more to say."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._requests, None))
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())
        frame = await asyncio.shield(self._next)
        self._next = None
        return frame

    async def to_the_end(self, seconds: float) -> None:
        """Wait so long until the destination has said its last word, or is gone: a word to a stream that has ended makes its
        gRPC forget how it ended, and what was the last word of this side."""
        with contextlib.suppress(grpc.aio.BaseError, TimeoutError):  # it is gone, or has had its time
            async with asyncio.timeout(seconds):
                while await self.read() is not None:
                    pass


class _Writer:
    """A stream's way out. A frame that its destination does not take stays with gRPC, also when nobody waits for it any more:
    until that is over nothing else can be written, nor the stream be ended."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._under_way: asyncio.Future[None] | None = None
        self._word = b""  # the last one

    async def write(self, frame: bytes) -> None:
        """Raises AioRpcError or UsageError as gRPC does, InvalidStateError if a write that was given up is still under way."""
        if self._under_way is not None and not self._under_way.done():
            raise asyncio.InvalidStateError("the frame before was not taken")
        if not frames.is_data(frame):
            self._word = frame
        self._under_way = asyncio.ensure_future(self._context.write(frame))
        self._under_way.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._under_way)

    @property
    def failed(self) -> bool:
        """The last word was Failed."""
        word = frames.parse(self._word) if self._word else None
        return isinstance(word, pb.Control) and word.WhichOneof("message") == "failed"

    async def settled(self) -> None:
        """Wait until the destination has taken the last frame or is lost; whoever cancels the stream waits with it."""
        while self._under_way is not None and not self._under_way.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((self._under_way,))


class CacheStore:
    """One per rank."""

    def __init__(self, memory: CacheMemory, paths: Paths, *, replica_id: str, epoch: int, rank: int,
                 config: TransferConfig) -> None:
        assert rank == memory.shard.rank
        self._memory = memory
        self._paths = paths
        self._replica_id = replica_id
        self._epoch = epoch
        self._config = config
        self._transfers: dict[str, SourceTransfer] = {}
        self._tombstones: OrderedDict[str, SlipstreamError] = OrderedDict()
        self._expected = asyncio.Condition()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with raw bytes: no serializer copies a payload, and rubbish is answered here, not by gRPC."""
        hello: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._hello)
        probe: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._answer_probe)
        transfer: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._transfer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            SERVICE, {"Hello": hello, "Probe": probe, "Transfer": transfer}),))

    def expect(self, transfer_id: str, request: RequestId, num_tokens: int, listener: TransferListener) -> SourceTransfer:
        """Announce a prompt that will be computed. Raises InvalidRequestError if the id is in use, or why it was refused."""
        if transfer_id in self._transfers:
            raise InvalidRequestError(f"transfer id {transfer_id} is in use; every request needs its own", field="transfer_id")
        if transfer_id in self._tombstones:
            raise self._tombstones[transfer_id]
        transfer = SourceTransfer(transfer_id, request.name, num_tokens, self._memory, self._paths, listener,
                                  config=self._config, on_end=self._forget)
        self._transfers[transfer_id] = transfer
        self._notify()
        return transfer

    def refuse(self, transfer_id: str, error: SlipstreamError) -> None:
        """The prompt will never come: whoever opens it, now or later, is told so at once."""
        if transfer := self._transfers.get(transfer_id):
            transfer.fail(error)
            return
        self._bury(transfer_id, error)
        self._notify()

    @property
    def open_transfers(self) -> int:
        """Prompts that are announced and not over."""
        return len(self._transfers)

    @property
    def transfers(self) -> Transfers:
        """The streams of this rank, both ways."""
        return self._paths.transfers

    @property
    def channels(self) -> list[str]:
        """What this rank offers, best first."""
        return self._paths.offers

    def _forget(self, transfer: SourceTransfer) -> None:
        self._transfers.pop(transfer.transfer_id, None)
        self._bury(transfer.transfer_id, transfer.error or TransferError(f"transfer {transfer.transfer_id} is over"))

    def _bury(self, transfer_id: str, error: SlipstreamError) -> None:
        self._tombstones[transfer_id] = error
        while len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._expected:
                self._expected.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        task.add_done_callback(lambda done: done.exception())

    async def _hello(self, message: bytes, context: Context) -> bytes:
        try:
            request = frames.decode(pb.HelloRequest, message)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        layout, shard = self._memory.layout, self._memory.shard
        differ = differences(layout.fields(), dict(request.layout.fields))
        if not differ:
            differ = self._misfit(request)
        if differ:
            logger.warning("%s keeps its cache another way: %s", request.replica_id, differ)
        return pb.HelloReply(replica_id=self._replica_id, epoch=self._epoch, rank=shard.rank, compatible=not differ,
                             reason=differ, layout=pb.Layout(hash=layout.hash, fields=layout.fields()),
                             geometry=frames.geometry_to_pb(shard.geometry),
                             channels=self._paths.addresses()).SerializeToString()

    async def _answer_probe(self, message: bytes, context: Context) -> bytes:
        try:
            request = frames.decode(pb.ProbeRequest, message)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        return (await self._paths.answer(request)).SerializeToString()

    def _misfit(self, message: pb.HelloRequest | pb.Open) -> str:
        """Why our layout can have no such destination rank; empty if it can."""
        layout = self._memory.layout
        try:
            plan.check(layout, Shard(geometry=frames.geometry_from_pb(message, len(layout.layers)), rank=message.rank))
        except IncompatibleError as error:
            return error.message
        return ""

    async def _transfer(self, requests: AsyncIterator[bytes], context: Context) -> None:
        reader = _Reader(requests)
        try:
            first = await reader.read()
            opened = frames.parse(first) if first is not None else None
            if not isinstance(opened, pb.Control) or opened.WhichOneof("message") != "open":
                raise ProtocolError("a Transfer stream starts with Open")
        except SlipstreamError as error:
            await context.write(frames.control(failed=pb.Failed(code=error.code, message=error.message)))
            return
        record, writer, unsettled = self._record(opened.open), _Writer(context), ""
        try:
            transfer = await self._find(opened.open)
            await transfer.serve(opened.open, reader.read, self._paths.writer(writer.write), record)
        except SlipstreamError as error:
            record.end(time.monotonic(), error.code)
            # It has ended, or stalls: a frame before was not taken.
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                await writer.write(frames.control(failed=pb.Failed(code=error.code, message=error.message)))
        except UnsettledError as error:
            unsettled = str(error)
        finally:
            record.end(time.monotonic(), LOST)
        await writer.settled()
        if unsettled:  # the end of a stream says that nothing is written any more; this one must not say so
            await context.abort(grpc.StatusCode.ABORTED, unsettled)
        if writer.failed:
            await reader.to_the_end(self._config.stall_seconds)

    def _record(self, opened: pb.Open) -> StreamRecord:
        return self.transfers.open(SEND, request_id=opened.request_id, transfer_id=opened.transfer_id, attempt=opened.attempt,
                                   rank=self._memory.shard.rank, peer=opened.replica_id, peer_rank=opened.rank,
                                   now=time.monotonic())

    async def _find(self, opened: pb.Open) -> SourceTransfer:
        """The transfer that Open names. Raises what makes it impossible."""
        if opened.epoch != self._epoch:
            raise TransferError(f"{self._replica_id} is of epoch {self._epoch}, not {opened.epoch}: it has restarted")
        if opened.compatibility_hash != self._memory.layout.hash:
            raise IncompatibleError(f"{self._replica_id} has compatibility hash {self._memory.layout.hash}, the destination "
                                    f"{opened.compatibility_hash}")
        if misfit := self._misfit(opened):
            raise IncompatibleError(f"the destination does not fit {self._replica_id}: {misfit}")
        name = opened.transfer_id
        wait = min(opened.remaining_ms / 1000, self._config.lease_seconds)
        try:
            async with asyncio.timeout(wait), self._expected:
                await self._expected.wait_for(lambda: name in self._transfers or name in self._tombstones)
        except TimeoutError as error:
            raise TransferError(f"no prompt came for transfer {name} within {wait:.1f} s") from error
        if name not in self._transfers:
            raise self._tombstones[name]
        transfer = self._transfers[name]
        if opened.request_id != transfer.request_id:
            raise ProtocolError(f"transfer {name} is request {transfer.request_id}'s, not {opened.request_id}'s")
        return transfer
