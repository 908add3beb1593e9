"""Fake workers and a fake directory: real gRPC servers that answer as a script says. Know no engine and no tensor.

They keep to the Worker protocol as the real ones do: prefill reports output 0 and, once decode has taken the prompt over, that
it handed off; decode reports output 1 and up. What the router sent is recorded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from slipstream.rpc import convert
from slipstream.rpc.server import listen, new_server
from slipstream.types import FinishReason, Role
from slipstream.v1 import directory_pb2, directory_pb2_grpc, worker_pb2_grpc
from slipstream.v1 import worker_pb2 as pb

IMAGE_SECONDS = 10.0
"""Longest wait for a picture that a request names."""


@dataclass(kw_only=True)
class Plan:
    """What becomes of one request."""

    tokens: tuple[int, ...] = ()
    """The whole output; cut at max_tokens."""
    reason: FinishReason = FinishReason.STOP
    busy: int = 0
    """Times that decode has no room."""
    prefill_error: pb.ErrorCode.ValueType | None = None
    decode_error: pb.ErrorCode.ValueType | None = None
    error_at: int = 0
    """The leg fails instead of reporting this output."""
    hold_at: int = -1
    """Nothing from this output on until `released` is set."""
    mess: bool = False
    """Tokens come twice and in reverse order, and some come for a wrong attempt."""
    skip: int = -1
    """Decode never reports this output."""
    drop_at: int = -1
    """The decode worker loses its Session instead of reporting this output."""
    batch: int = 1
    """Decode's tokens per report."""


@dataclass(kw_only=True)
class Seen:
    """What happened to one request, as the workers saw it."""

    plan: Plan
    submits: dict[Role, list[pb.Submit]] = field(default_factory=lambda: {role: [] for role in Role})
    """By role, in order of arrival."""
    workers: dict[Role, list[str]] = field(default_factory=lambda: {role: [] for role in Role})
    """Who got them."""
    cancels: dict[Role, list[int]] = field(default_factory=lambda: {role: [] for role in Role})
    """Attempts."""
    first: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output(self) -> tuple[int, ...]:
        """All tokens that the client should get, if it goes well."""
        return self.plan.tokens[: self.submits[Role.PREFILL][0].max_tokens] if self.submits[Role.PREFILL] else ()

    @property
    def reason(self) -> FinishReason:
        """Why they end."""
        return self.plan.reason if len(self.output) == len(self.plan.tokens) else FinishReason.LENGTH


class Script:
    """What the workers of one deployment are told, and what they saw. Lives on their event loop."""

    def __init__(self) -> None:
        self.plans: deque[Plan] = deque()
        """One for each request to come."""
        self.default = Plan()
        """For requests beyond those."""
        self.seen: dict[str, Seen] = {}
        """By request id, in order of arrival."""
        self.by_handle: dict[tuple[Role, int], Seen] = {}
        self.puts = 0
        """Pictures that came."""

    def see(self, request_id: str) -> Seen:
        """The record of a request; the first sight takes a plan."""
        if request_id not in self.seen:
            self.seen[request_id] = Seen(plan=self.plans.popleft() if self.plans else self.default)
        return self.seen[request_id]

    @property
    def last(self) -> Seen:
        """The latest request."""
        return next(reversed(self.seen.values()))


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One replica."""

    def __init__(self, script: Script, role: Role, **info: Any) -> None:
        """`info`: fields of WorkerInfo that differ from the usual."""
        self.role = role
        self.script = script
        self.info = pb.WorkerInfo(
            replica_id=f"{role.value}-0",
            epoch=1,
            role=convert.role_to_pb(role),
            model_name="demo_model",
            pid=1,
            compatibility_hash="same",
            block_size=16, total_blocks=4096, total_state_slots=64, max_context=1 << 20, max_running=64,
            version="0", device="cpu", dtype="float32", tensor_parallel=1, pipeline_parallel=1,
        )
        self.info.MergeFrom(pb.WorkerInfo(**info))
        self.images: dict[bytes, tuple[int, int, bytes]] = {}
        self.image_arrived = asyncio.Condition()
        self.address = ""
        self.load = pb.Load(free_blocks=4096, free_state_slots=64)
        self.submits: list[pb.Submit] = []
        self.takes_pictures = True
        self.silent = False
        """True: nothing is said any more, as by a stopped process."""
        self._server: grpc.aio.Server | None = None
        self._queues: set[asyncio.Queue[pb.WorkerMessage | None]] = set()

    async def start(self, address: str = "127.0.0.1:0") -> None:
        """Listen; `address` says where afterwards."""
        self._server = new_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = await listen(self._server, address)
        self.info.cache_store_addresses[:] = [self.address]

    async def stop(self) -> None:
        """End at once."""
        if self._server is not None:
            await self._server.stop(grace=None)

    @property
    def connected(self) -> bool:
        """True while a router has a Session."""
        return bool(self._queues)

    def drain(self) -> None:
        """Say so at once."""
        self.info.draining = self.load.draining = True
        self.beat()

    def beat(self) -> None:
        """Tell the load."""
        self.say(pb.WorkerMessage(load=self.load))

    def say(self, message: pb.WorkerMessage) -> None:
        """Tell every router anything at all."""
        for queue in self._queues:
            queue.put_nowait(message)

    def drop_sessions(self) -> None:
        """End every Session, as a crash would."""
        for queue in self._queues:
            queue.put_nowait(None)

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:  # noqa: N802 (gRPC's name)
        """What the script says."""
        return self.info

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: N802
        """Take nothing new; running requests are not awaited."""
        self.drain()
        return pb.DrainReply()

    async def PutImage(self, request_iterator: AsyncIterator[pb.ImageChunk], context: Any) -> pb.PutImageReply:  # noqa: N802
        """Keep the pixels."""
        if not self.takes_pictures:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room for pictures")
        head, data = pb.ImageChunk(), b""
        async for chunk in request_iterator:
            if not data:
                head = chunk
            data += chunk.data
        known = head.content_hash in self.images
        self.script.puts += 1
        async with self.image_arrived:
            self.images[head.content_hash] = (head.height, head.width, data)
            self.image_arrived.notify_all()
        return pb.PutImageReply(already_present=known)

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: Any
    ) -> AsyncIterator[pb.WorkerMessage]:
        """One router's stream."""
        queue: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        queue.put_nowait(pb.WorkerMessage(load=self.load))
        self._queues.add(queue)
        legs: dict[tuple[int, int], asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._read(request_iterator, queue, legs))
        pulse = asyncio.create_task(self._pulse(queue))
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.discard(queue)
            for task in (reader, pulse, *legs.values()):
                task.cancel()

    async def _pulse(self, queue: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        """Once a second a sign of life, unless the script says to play dead."""
        while True:
            await asyncio.sleep(1.0)
            if not self.silent:
                queue.put_nowait(pb.WorkerMessage(load=self.load))

    async def _read(
        self,
        messages: AsyncIterator[pb.RouterMessage],
        queue: asyncio.Queue[pb.WorkerMessage | None],
        legs: dict[tuple[int, int], asyncio.Task[None]],
    ) -> None:
        async for message in messages:
            if message.WhichOneof("message") == "submit":
                submit = message.submit
                self.submits.append(submit)
                seen = self.script.see(submit.request_id)
                seen.submits[self.role].append(submit)
                seen.workers[self.role].append(self.info.replica_id)
                work = self._prefill if self.role is Role.PREFILL else self._decode
                legs[submit.handle, submit.attempt] = asyncio.create_task(work(submit, seen, queue))
                self.script.by_handle[self.role, submit.handle] = seen
            else:
                cancel = message.cancel
                if known := self.script.by_handle.get((self.role, cancel.handle)):
                    known.cancels[self.role].append(cancel.attempt)
                task = legs.get((cancel.handle, cancel.attempt))
                if task is not None and not task.done():
                    task.cancel()
                    _fail(queue, cancel.handle, cancel.attempt, pb.ERROR_CODE_CANCELLED)

    async def _prefill(self, submit: pb.Submit, seen: Seen, queue: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        plan = seen.plan
        async with self.image_arrived:
            await asyncio.wait_for(
                self.image_arrived.wait_for(lambda: all(image.content_hash in self.images for image in submit.images)),
                IMAGE_SECONDS,
            )
        if plan.prefill_error is not None and plan.error_at == 0:
            _fail(queue, submit.handle, submit.attempt, plan.prefill_error)
            return
        await _hold(seen, 0)
        self._tokens(queue, submit, seen, [0])
        seen.first.set()
        stats = pb.LegStats(queue_seconds=0.25, compute_seconds=0.5)
        if len(seen.output) == 1:
            _finish(queue, submit, stats, seen.reason)
            return
        if plan.prefill_error is not None:
            _fail(queue, submit.handle, submit.attempt, plan.prefill_error)
            return
        await seen.taken.wait()
        _finish(queue, submit, stats, None)

    async def _decode(self, submit: pb.Submit, seen: Seen, queue: asyncio.Queue[pb.WorkerMessage | None]) -> None:
        plan = seen.plan
        if len(seen.submits[Role.DECODE]) <= plan.busy:
            _fail(queue, submit.handle, submit.attempt, pb.ERROR_CODE_BUSY)
            return
        if plan.decode_error is not None and plan.error_at == 0:
            _fail(queue, submit.handle, submit.attempt, plan.decode_error)
            return
        await seen.first.wait()
        seen.taken.set()
        stats = pb.LegStats(compute_seconds=2.0, transfer_seconds=0.125, kv_bytes=1000, state_bytes=24)
        output = seen.output
        if plan.mess:
            self._tokens(queue, submit, seen, [*range(len(output) - 1, 0, -1), *range(1, len(output))])
            self._tokens(queue, submit, seen, [0, 1, len(output) - 1])
            wrong = pb.Submit(handle=submit.handle, attempt=submit.attempt + 7)
            self._tokens(queue, wrong, seen, [1, 2])
        indices = [] if plan.mess else [index for index in range(1, len(output)) if index != plan.skip]
        for start in range(0, len(indices), plan.batch):
            group = indices[start : start + plan.batch]
            if plan.decode_error is not None and group[0] >= plan.error_at:
                _fail(queue, submit.handle, submit.attempt, plan.decode_error)
                return
            if group[0] == plan.drop_at:
                queue.put_nowait(None)
                return
            await _hold(seen, group[0])
            self._tokens(queue, submit, seen, group)
            await asyncio.sleep(0)
        _finish(queue, submit, stats, seen.reason)

    def _tokens(self, queue: asyncio.Queue[pb.WorkerMessage | None], submit: pb.Submit, seen: Seen, indices: list[int]) -> None:
        count = len(indices)
        queue.put_nowait(
            pb.WorkerMessage(
                step=pb.StepReport(
                    handle=[submit.handle] * count,
                    attempt=[submit.attempt] * count,
                    choice=[0] * count,
                    index=indices,
                    token=[seen.output[index] for index in indices],
                    logprobs=_logprobs(submit, seen, indices),
                    load=self.load,
                )
            )
        )


def _logprobs(submit: pb.Submit, seen: Seen, indices: list[int]) -> list[pb.Logprobs]:
    """If asked for: of output i, -i - 1, and as the most probable ones the token itself and those of the next ids."""
    if not submit.sampling.HasField("logprobs"):
        return []
    wanted = range(submit.sampling.logprobs)
    return [
        pb.Logprobs(row=row, logprob=-index - 1, top_token=[seen.output[index] + i for i in wanted],
                    top_logprob=[-index - 1 - i for i in wanted])
        for row, index in enumerate(indices)
    ]


async def _hold(seen: Seen, index: int) -> None:
    if 0 <= seen.plan.hold_at <= index:
        seen.held.set()
        await seen.released.wait()


def _finish(
    queue: asyncio.Queue[pb.WorkerMessage | None], submit: pb.Submit, stats: pb.LegStats, reason: FinishReason | None
) -> None:
    queue.put_nowait(
        pb.WorkerMessage(
            step=pb.StepReport(
                finished=[
                    pb.Finished(
                        handle=submit.handle,
                        attempt=submit.attempt,
                        handed_off=reason is None,
                        stats=stats,
                        reason=pb.FINISH_REASON_UNSPECIFIED if reason is None else convert.finish_to_pb(reason),
                    )
                ]
            )
        )
    )


def _fail(queue: asyncio.Queue[pb.WorkerMessage | None], handle: int, attempt: int, code: pb.ErrorCode.ValueType) -> None:
    failed = pb.Failed(handle=handle, attempt=attempt, code=code, message=f"scripted {pb.ErrorCode.Name(code)}",
                       retry_after_ms=5 if code == pb.ERROR_CODE_BUSY else 0)
    queue.put_nowait(pb.WorkerMessage(step=pb.StepReport(failed=[failed])))


class FakeDirectory(directory_pb2_grpc.DirectoryServicer):
    """Tells routers what the test says exists."""

    def __init__(self) -> None:
        self.address = ""
        self._snapshot = directory_pb2.Snapshot()
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen; `address` says where afterwards."""
        self._server = new_server()
        directory_pb2_grpc.add_DirectoryServicer_to_server(self, self._server)
        self.address = await listen(self._server, "127.0.0.1:0")

    async def stop(self) -> None:
        """End at once."""
        if self._server is not None:
            await self._server.stop(grace=None)

    def show(self, *workers: FakeWorker) -> None:
        """These exist now, and no others."""
        self._snapshot = directory_pb2.Snapshot(
            endpoints=[
                directory_pb2.Endpoint(
                    replica_id=one.info.replica_id, role=one.info.role, address=one.address, epoch=one.info.epoch
                )
                for one in workers
            ]
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[directory_pb2.Snapshot]:  # noqa: N802
        """What was shown last, and again after each change."""
        while True:
            changed = self._changed
            yield self._snapshot
            await changed.wait()
