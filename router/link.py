"""The router's connections to workers: one Session each, kept alive and re-opened. Knows no request beyond its handle.

A lost Session ends every request that was on it: the worker cancels its half, `lost` tells the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from router.actions import Row
from router.policy import Replica
from router.prefix_index import PrefixIndex
from router.silence import unless_silent
from slipstream.errors import InternalError, RequestTooLargeError, SlipstreamError, UnavailableError
from slipstream.rpc import convert
from slipstream.rpc.channel import NOT_THERE, connect, reason
from slipstream.rpc.security import OPEN, Security
from slipstream.text.images import Picture
from slipstream.types import Logprobs
from slipstream.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

_INFO_SECONDS = 5.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 1.0
_IMAGE_CHUNK = 1 << 20
PATIENCE_SECONDS = 60.0
"""How long a worker may take to come up before its absence is a warning."""


class LegSink(Protocol):
    """What a request's leg hears from its worker; called on the event loop."""

    def on_tokens(self, attempt: int, rows: Sequence[Row]) -> None:
        """Tokens of one step."""

    def on_computed(self, message: worker_pb2.Finished) -> None:
        """What the leg did; its end comes later."""

    def on_finished(self, message: worker_pb2.Finished) -> None:
        """The leg ended well."""

    def on_failed(self, attempt: int, error: SlipstreamError) -> None:
        """The leg failed, or its Session was lost."""

    def on_fault(self, error: SlipstreamError) -> None:
        """The router could not handle what the leg said."""


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    sink: LegSink
    attempt: int
    tokens: int
    """That it has to compute of a prompt."""


class WorkerLink:
    """One worker. `info` is None while it is not connected."""

    def __init__(self, address: str, check: Callable[[WorkerLink, worker_pb2.WorkerInfo], None], on_change: Callable[[], None],
                 silence_seconds: float = 10.0, security: Security = OPEN, index: PrefixIndex | None = None) -> None:
        """`check` raises IncompatibleError for a worker that is not to be used. `silence_seconds`: workers tell their load
        about once a second, so one that says nothing for so long is stuck, and its Session is given up. `index`: keeps what
        the worker's prefix cache holds; None: nobody asks."""
        self.address = address
        self.leaving = False
        """It gets nothing new, and is forgotten once nothing of it is awaited."""
        self._check = check
        self._silence_seconds = silence_seconds
        self._index = index
        self._view: Replica | None = None
        self._computing: set[int] = set()  # handles of prompts that are on their way to be computed
        self.info: worker_pb2.WorkerInfo | None = None
        self.last_info: worker_pb2.WorkerInfo | None = None
        """Of the last Session."""
        self.load = worker_pb2.Load()
        self.problem = self._told = "connecting"
        self._added = time.monotonic()
        self._on_change = on_change
        self._channel = connect(address, security)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._outgoing: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self._sinks: dict[int, _Waiting] = {}
        self._task = asyncio.create_task(self._keep(), name=f"worker {address}")

    async def close(self) -> None:
        """End the Session; the requests on it fail."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._channel.close()

    # What the dispatcher uses -----------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True while a Session is open."""
        return self.info is not None

    @property
    def draining(self) -> bool:
        """True if the worker takes nothing new."""
        return self.load.draining or self.leaving

    @property
    def idle(self) -> bool:
        """True if no leg is awaited from it."""
        return not self._sinks

    def view(self) -> Replica | None:
        """For the policy; None while the worker is not connected."""
        if self._view is not None:
            self._view.in_flight, self._view.draining = len(self._sinks), self.draining
        return self._view

    def connected(self) -> worker_pb2.WorkerInfo:
        """What it says of itself. Raises UnavailableError without a Session."""
        if self.info is None:
            raise UnavailableError(f"the worker at {self.address} is not connected", retry_after_seconds=1.0)
        return self.info

    def submit(self, message: worker_pb2.Submit, sink: LegSink, tokens: int = 0) -> None:
        """Send a request; its answers go to `sink` until it ends. `tokens`: of a prompt, that it probably has to compute.
        Raises UnavailableError without a Session."""
        self.connected()
        if before := self._sinks.get(message.handle):
            self._computed(message.handle, before)
        self._sinks[message.handle] = _Waiting(sink=sink, attempt=message.attempt, tokens=tokens)
        if self._view is not None:
            self._computing.add(message.handle)
            self._view.pending_tokens += tokens
        self._outgoing.put_nowait(worker_pb2.RouterMessage(submit=message))

    def cancel(self, handle: int, attempt: int) -> None:
        """Nothing more is heard of the request."""
        self._forget(handle)
        if self.info is not None:
            self._outgoing.put_nowait(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(handle=handle, attempt=attempt)))

    async def put_image(self, picture: Picture, request_id: str, timeout_seconds: float) -> None:
        """Send pixels by content hash. Raises UnavailableError, or RequestTooLargeError for what no worker could keep."""
        pixels = memoryview(picture.pixels.reshape(-1).data)

        async def chunks() -> AsyncIterator[worker_pb2.ImageChunk]:
            for start in range(0, len(pixels), _IMAGE_CHUNK):
                chunk = worker_pb2.ImageChunk(data=bytes(pixels[start : start + _IMAGE_CHUNK]))
                if start == 0:
                    chunk.content_hash, chunk.request_id = picture.content_hash, request_id
                    chunk.height, chunk.width = picture.pixels.shape[-3:-1]
                    chunk.frames = len(picture.pixels) if picture.is_video else 0
                yield chunk

        try:
            await self._stub.PutImage(chunks(), timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise RequestTooLargeError(f"{error.details()}; send a smaller picture, or fewer or smaller frames") from error
            raise UnavailableError(f"the prefill worker did not take a picture: {error.code().name} {error.details()}",
                                   retry_after_seconds=1.0) from error

    async def inspect(self, timeout_seconds: float, *, only_transfers: bool) -> worker_pb2.InspectReply:
        """Its transfers in flight, its kernel table and who holds its memory. Raises UnavailableError."""
        try:
            asked = worker_pb2.InspectRequest(only_transfers=only_transfers)
            return await self._stub.Inspect(asked, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(reason(error)) from error

    # The Session ------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                info = await self._stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_INFO_SECONDS)
                convert.role_from_pb(info.role)
                self._check(self, info)
                wait = _FIRST_WAIT_SECONDS
                await self._session(info)
                self.problem = "the session ended"
            except grpc.aio.AioRpcError as error:
                self.problem = reason(error)
            except SlipstreamError as error:
                self.problem = error.message
            except Exception as error:
                logger.exception("the session with %s broke", self.address)
                self.problem = f"it sent what this router cannot read ({type(error).__name__})"
            finally:
                self._lost()
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def _session(self, info: worker_pb2.WorkerInfo) -> None:
        self._outgoing = asyncio.Queue()
        call = self._stub.Session()
        writer = asyncio.create_task(_write(call, self._outgoing))
        try:
            self.load = worker_pb2.Load(free_blocks=info.total_blocks, free_state_slots=info.total_state_slots,
                                        draining=info.draining)
            self.info = self.last_info = info
            self._view, self._computing = _described(self.address, info), set()
            self._loaded(self.load)
            if self._index is not None:
                self._index.add(self.address)
                self._outgoing.put_nowait(worker_pb2.RouterMessage(watch_cache=worker_pb2.WatchCache()))
            logger.info("connected to %s at %s, epoch %d", info.replica_id, self.address, info.epoch)
            self._on_change()
            async for message in unless_silent(call, self._silence_seconds):
                if message.WhichOneof("message") == "step":
                    self._on_step(message.step)
                elif message.WhichOneof("message") == "load":
                    self._loaded(message.load)
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _lost(self) -> None:
        young = self.last_info is None and time.monotonic() - self._added < PATIENCE_SECONDS
        told = "" if young and self.problem == NOT_THERE else self.problem
        if self.info is not None:
            logger.warning("lost %s at %s: %s", self.info.replica_id, self.address, self.problem)
        elif told != self._told:
            if told:
                logger.warning("the worker at %s cannot be used: %s", self.address, told)
            else:
                logger.info("waiting for the worker at %s", self.address)
        self._told = told
        self.info = self._view = None
        if self._index is not None:
            self._index.remove(self.address)
        sinks, self._sinks = self._sinks, {}
        for handle, waiting in sinks.items():
            lost = UnavailableError(f"the worker at {self.address} was lost: {self.problem}", retry_after_seconds=1.0)
            self._tell(handle, waiting, partial(waiting.sink.on_failed, waiting.attempt, lost))
        self._on_change()

    def _loaded(self, load: worker_pb2.Load) -> None:
        self.load = load
        if (view := self._view) is not None:
            view.waiting, view.running, view.free_blocks = load.waiting, load.running, load.free_blocks
            view.waiting_tokens, view.tokens_per_second = load.waiting_tokens, load.tokens_per_second

    def _on_step(self, step: worker_pb2.StepReport) -> None:
        if self._index is not None and step.HasField("cache"):
            told = step.cache
            if not self._index.hear(self.address, told.number, reset=told.reset, blocks=told.blocks, snapshots=told.snapshots,
                                    removed=told.removed):
                logger.warning("news of the prefix cache of %s are missing; asking for all of it", self.address)
                self._outgoing.put_nowait(worker_pb2.RouterMessage(watch_cache=worker_pb2.WatchCache()))
        for computed in step.computed:
            if (waiting := self._sinks.get(computed.handle)) and waiting.attempt == computed.attempt:
                self._tell(computed.handle, waiting, partial(waiting.sink.on_computed, computed))
        for key, rows in _by_leg(step).items():
            if (waiting := self._sinks.get(key[0])) and waiting.attempt == key[1]:
                self._computed(key[0], waiting)
                self._tell(key[0], waiting, partial(waiting.sink.on_tokens, key[1], rows))
        for finished in step.finished:
            if waiting := self._pop(finished.handle, finished.attempt):
                self._tell(finished.handle, waiting, partial(waiting.sink.on_finished, finished))
        for failed in step.failed:
            if waiting := self._pop(failed.handle, failed.attempt):
                self._tell(failed.handle, waiting, partial(waiting.sink.on_failed, failed.attempt,
                                                           convert.failed_from_pb(failed)))
        if step.HasField("load"):
            self._loaded(step.load)

    def _tell(self, handle: int, waiting: _Waiting, news: Callable[[], None]) -> None:
        """A fault in one request's handling ends that request; the Session and everybody else on it go on."""
        try:
            news()
        except Exception:
            logger.exception("news from the worker at %s could not be handled", self.address)
            self._forget(handle)
            waiting.sink.on_fault(InternalError("a fault of the router ended the request; its log has more"))

    def _pop(self, handle: int, attempt: int) -> _Waiting | None:
        waiting = self._sinks.get(handle)
        if waiting is None or waiting.attempt != attempt:
            return None
        self._forget(handle)
        return waiting

    def _computed(self, handle: int, waiting: _Waiting) -> None:
        """A prompt has its first token, or is not computed any more."""
        if handle in self._computing and self._view is not None:
            self._computing.discard(handle)
            self._view.pending_tokens -= waiting.tokens

    def _forget(self, handle: int) -> None:
        if (waiting := self._sinks.pop(handle, None)) is None:
            return
        self._computed(handle, waiting)
        if self.leaving and not self._sinks:
            self._on_change()


def _described(address: str, info: worker_pb2.WorkerInfo) -> Replica:
    return Replica(
        id=address, name=info.replica_id, role=convert.role_from_pb(info.role), compatibility_hash=info.compatibility_hash,
        block_size=info.block_size, dtype=info.dtype, channels=frozenset(info.channels), host=info.host,
        max_running=info.max_running, total_blocks=info.total_blocks, kv_bytes_per_token=info.kv_bytes_per_token,
        state_bytes=info.state_bytes, needs_snapshots=info.total_state_slots > 0, computes_prompts=info.computes_prompts)


def _by_leg(step: worker_pb2.StepReport) -> dict[tuple[int, int], list[Row]]:
    """The rows of a report by (handle, attempt). Raises ValueError for columns of different lengths.

    Logprobs that cannot be read are left out: their run fails for want of them.
    """
    told: dict[int, Logprobs] = {}
    for one in step.logprobs:
        with contextlib.suppress(ValueError):
            told[one.row] = convert.logprobs_from_pb(one)
    prompts = {one.row: convert.prompt_logprobs_from_pb(one) for one in step.prompt_logprobs}
    found: dict[tuple[int, int], list[Row]] = {}
    columns = zip(step.handle, step.attempt, step.choice, step.index, step.token, step.finish, strict=True)
    for number, (handle, attempt, choice, index, token, finish) in enumerate(columns):
        row = Row(choice=choice, index=index, token=token, finish=convert.finish_from_pb(finish), logprobs=told.get(number),
                  prompt=prompts.get(number))
        found.setdefault((handle, attempt), []).append(row)
    return found


async def _write(call: Any, queue: asyncio.Queue[worker_pb2.RouterMessage]) -> None:
    """Send what is queued; the reader of the same call sees how the call ended."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await queue.get())
