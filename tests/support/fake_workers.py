"""Fake workers: real gRPC servers that answer as a script says. Know no engine and no tensor.

They keep to the Worker protocol as the real ones do: prefill reports each choice's first token (of a resumed one: the next),
and that it handed off once decode has taken the prompt over; decode reports the others. What the router sent is recorded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from router.request import RUN_MARK
from slipstream.rpc import convert
from slipstream.rpc.server import listen, new_server
from slipstream.types import FinishReason, Role
from slipstream.v1 import worker_pb2 as pb
from slipstream.v1 import worker_pb2_grpc

Queue = asyncio.Queue[pb.WorkerMessage | None]
IMAGE_SECONDS = 10.0
"""Longest wait for a picture that a request names."""


@dataclass(kw_only=True)
class Plan:
    """What becomes of one request."""

    tokens: tuple[int, ...] = ()
    """The whole output of choice 0; cut at max_tokens."""
    others: tuple[tuple[int, ...], ...] = ()
    """Outputs of the choices after it; of those that are not here: as choice 0."""
    reason: FinishReason = FinishReason.STOP
    busy: int = 0
    """Times that decode has no room."""
    prefill_error: pb.ErrorCode.ValueType | None = None
    decode_error: pb.ErrorCode.ValueType | None = None
    error_at: int = 0
    """The leg fails instead of reporting this output."""
    failures: int = 1 << 20
    """Runs that fail, or lose their worker, before one goes well."""
    hold_at: int = -1
    """Nothing from this output on until `released` is set."""
    mess: bool = False
    """Tokens come twice and in reverse order, and some come for a wrong attempt."""
    skip: int = -1
    """Decode never reports this output."""
    drop_at: int = -1
    """The decode worker loses its Sessions instead of reporting this output."""
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
    released: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    failed: int = 0
    """Runs that did not go well."""

    def output(self, choice: int = 0) -> tuple[int, ...]:
        """All tokens that the client should get of a choice, if it goes well."""
        submits = self.submits[Role.PREFILL] or self.submits[Role.DECODE]
        return self._planned(choice)[: submits[0].max_tokens] if submits else ()

    def finish(self, choice: int, index: int) -> FinishReason | None:
        """Why output `index` is the last one of a choice, if it is."""
        output = self.output(choice)
        if index < len(output) - 1:
            return None
        return self.plan.reason if len(output) == len(self._planned(choice)) else FinishReason.LENGTH

    def _planned(self, choice: int) -> tuple[int, ...]:
        others = self.plan.others
        return others[choice - 1] if 0 < choice <= len(others) else self.plan.tokens

    def fails(self) -> bool:
        """True for a run that is one of those that fail; counts it."""
        self.failed += 1
        return self.failed <= self.plan.failures


@dataclass(kw_only=True)
class Transfer:
    """What the two legs of a run know of each other."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class Script:
    """What the workers of one deployment are told, and what they saw. Lives on their event loop."""

    def __init__(self) -> None:
        self.plans: deque[Plan] = deque()
        """One for each request to come."""
        self.default = Plan()
        """For requests beyond those."""
        self.seen: dict[str, Seen] = {}
        """By request id, in order of arrival; all runs of a request are one record."""
        self.transfers: dict[str, Transfer] = {}
        self.by_handle: dict[tuple[Role, int], Seen] = {}
        self.puts = 0
        """Pictures that came."""

    def see(self, request_id: str) -> Seen:
        """The record of a request; the first sight takes a plan."""
        request_id = request_id.partition(RUN_MARK)[0]
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
            replica_id=f"{role.value}-0", epoch=1, role=convert.role_to_pb(role), model_name="demo_model", pid=1,
            compatibility_hash="same", block_size=16, total_blocks=4096, total_state_slots=64, max_context=1 << 20,
            max_running=64, computes_prompts=role is Role.DECODE,
            version="0", device="cpu", dtype="float32", tensor_parallel=1, pipeline_parallel=1,
        )
        self.info.MergeFrom(pb.WorkerInfo(**info))
        self.images: dict[bytes, tuple[int, int, bytes]] = {}
        self.image_arrived = asyncio.Condition()
        self.address = ""
        self.load = pb.Load(free_blocks=4096, free_state_slots=64)
        self.submits: list[pb.Submit] = []
        self.refuses_pictures: grpc.StatusCode | None = None
        self.silent = False
        """True: nothing is said any more, as by a stopped process."""
        self._server: grpc.aio.Server | None = None
        self._queues: set[Queue] = set()
        self.cached: set[int] = set()
        """Short keys of blocks, all with snapshots; `number` is that of the last message about them."""
        self.number = 1
        self.watches = 0
        """How often a router asked for all of them."""

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

    async def Inspect(self, request: pb.InspectRequest, context: Any) -> pb.InspectReply:  # noqa: N802
        """One kernel, and nothing held."""
        await asyncio.sleep(3600 if self.silent else 0)
        free = pb.Holding(owner="free", blocks=self.load.free_blocks, state_slots=self.load.free_state_slots)
        return pb.InspectReply(kernels=[pb.Kernel(op="attention", implementation="script", reason="a fake")], holdings=[free])

    async def PutImage(self, request_iterator: AsyncIterator[pb.ImageChunk], context: Any) -> pb.PutImageReply:  # noqa: N802
        """Keep the pixels."""
        if self.refuses_pictures is not None:
            await context.abort(self.refuses_pictures, "no room for pictures")
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

    async def Session(self, request_iterator: AsyncIterator[pb.RouterMessage],  # noqa: N802
                      context: Any) -> AsyncIterator[pb.WorkerMessage]:
        """One router's stream."""
        queue: Queue = asyncio.Queue()
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

    async def _pulse(self, queue: Queue) -> None:
        """Once a second a sign of life, unless the script says to play dead."""
        while True:
            await asyncio.sleep(1.0)
            if not self.silent:
                queue.put_nowait(pb.WorkerMessage(load=self.load))

    async def _read(
        self,
        messages: AsyncIterator[pb.RouterMessage],
        queue: Queue,
        legs: dict[tuple[int, int], asyncio.Task[None]],
    ) -> None:
        async for message in messages:
            if message.WhichOneof("message") == "watch_cache":
                self.watches += 1
                queue.put_nowait(pb.WorkerMessage(step=pb.StepReport(cache=pb.CacheChanges(
                    number=self.number, reset=True, snapshots=sorted(self.cached)))))
            elif message.WhichOneof("message") == "submit":
                submit = message.submit
                self.submits.append(submit)
                seen = self.script.see(submit.request_id)
                seen.submits[self.role].append(submit)
                seen.workers[self.role].append(self.info.replica_id)
                work = self._prefill if self.role is Role.PREFILL else self._local if submit.local else self._decode
                legs[submit.handle, submit.attempt] = asyncio.create_task(work(submit, seen, queue))
                self.script.by_handle[self.role, submit.handle] = seen
            else:
                cancel = message.cancel
                if known := self.script.by_handle.get((self.role, cancel.handle)):
                    known.cancels[self.role].append(cancel.attempt)
                task = legs.get((cancel.handle, cancel.attempt))
                if task is not None and not task.done():
                    task.cancel()
                    _fail(queue, cancel, pb.ERROR_CODE_CANCELLED)

    async def _prefill(self, submit: pb.Submit, seen: Seen, queue: Queue) -> None:
        plan, transfer, base = seen.plan, self.script.transfers.setdefault(submit.transfer_id, Transfer()), len(submit.output)
        async with self.image_arrived:
            here = self.image_arrived.wait_for(lambda: all(image.content_hash in self.images for image in submit.images))
            await asyncio.wait_for(here, IMAGE_SECONDS)
        if plan.prefill_error is not None and plan.error_at <= base and seen.fails():
            _fail(queue, submit, plan.prefill_error)
            return
        await _hold(seen, base)
        self._tokens(queue, submit, seen, [(choice, base) for choice in _choices(submit)])
        transfer.first.set()
        stats = pb.LegStats(queue_seconds=0.25, compute_seconds=0.5, cached_tokens=len(submit.tokens) // 2)
        if all(seen.finish(choice, base) for choice in _choices(submit)):
            _finish(queue, submit, stats, handed_off=False)
            return
        if plan.prefill_error is not None and seen.fails():
            _fail(queue, submit, plan.prefill_error)
            return
        await transfer.taken.wait()
        _finish(queue, submit, stats, handed_off=True)

    async def _local(self, submit: pb.Submit, seen: Seen, queue: Queue) -> None:
        """Both halves."""
        plan, base = seen.plan, len(submit.output)
        if len(seen.submits[Role.DECODE]) <= plan.busy:
            _fail(queue, submit, pb.ERROR_CODE_BUSY)
            return
        for index in range(base, len(seen.output())):
            if plan.decode_error is not None and index >= plan.error_at and seen.fails():
                _fail(queue, submit, plan.decode_error)
                return
            await _hold(seen, index)
            self._tokens(queue, submit, seen, [(choice, index) for choice in _choices(submit)])
            await asyncio.sleep(0)
        stats = pb.LegStats(queue_seconds=0.25, compute_seconds=2.0, cached_tokens=len(submit.tokens) // 2)
        _finish(queue, submit, stats, handed_off=False)

    async def _decode(self, submit: pb.Submit, seen: Seen, queue: Queue) -> None:
        plan, transfer, base = seen.plan, self.script.transfers.setdefault(submit.transfer_id, Transfer()), len(submit.output)
        if len(seen.submits[Role.DECODE]) <= plan.busy:
            _fail(queue, submit, pb.ERROR_CODE_BUSY)
            return
        if plan.decode_error is not None and plan.error_at <= base and seen.fails():
            _fail(queue, submit, plan.decode_error)
            return
        await transfer.first.wait()
        transfer.taken.set()
        rows = [(choice, index) for index in range(base + 1, max(len(seen.output(choice)) for choice in _choices(submit)))
                for choice in _choices(submit) if index < len(seen.output(choice)) and index != plan.skip]
        if plan.mess:
            self._tokens(queue, submit, seen, [*reversed(rows), *rows])
            self._tokens(queue, submit, seen, [(0, base), *rows[:1], *rows[-1:]])
            wrong = pb.Submit(handle=submit.handle, attempt=submit.attempt + 7)
            self._tokens(queue, wrong, seen, rows[:2])
            rows = []
        for start in range(0, len(rows), plan.batch):
            group = rows[start : start + plan.batch]
            index = group[0][1]
            if plan.decode_error is not None and index >= plan.error_at and seen.fails():
                _fail(queue, submit, plan.decode_error)
                return
            if index == plan.drop_at and seen.fails():
                self.drop_sessions()
                return
            await _hold(seen, index)
            self._tokens(queue, submit, seen, group)
            await asyncio.sleep(0)
        stats = pb.LegStats(compute_seconds=2.0, transfer_seconds=0.125, kv_bytes=1000, state_bytes=24)
        _finish(queue, submit, stats, handed_off=False)

    def _tokens(self, queue: Queue, submit: pb.Submit, seen: Seen, rows: list[tuple[int, int]]) -> None:
        """Of (choice, index)."""
        report = pb.StepReport(load=self.load)
        for number, (choice, index) in enumerate(rows):
            token = seen.output(choice)[index]
            report.handle.append(submit.handle)
            report.attempt.append(submit.attempt)
            report.choice.append(choice)
            report.index.append(index)
            report.token.append(token)
            report.finish.append(convert.finish_to_pb(seen.finish(choice, index)))
            if submit.sampling.HasField("logprobs"):  # of output i, -i - 1; most probable: the token and those of the next ids
                wanted = range(submit.sampling.logprobs)
                report.logprobs.append(pb.Logprobs(row=number, logprob=-index - 1, top_token=[token + i for i in wanted],
                                                   top_logprob=[-index - 1 - i for i in wanted]))
        if submit.HasField("prompt_logprobs") and rows[0] == (_choices(submit)[0], len(submit.output)):
            report.prompt_logprobs.append(scores(submit))
        queue.put_nowait(pb.WorkerMessage(step=report))


def scores(submit: pb.Submit) -> pb.PromptLogprobs:
    """Of prompt token i, -i / 4, of rank i; most probable: those of the next ids, at -i / 8 and less."""
    wanted, numbers = range(submit.prompt_logprobs), range(1, len(submit.tokens))
    return pb.PromptLogprobs(row=0, logprob=[-i / 4 for i in numbers], rank=numbers,
                             top_token=[submit.tokens[i] + 1 + j for i in numbers for j in wanted],
                             top_logprob=[-i / 8 - j for i in numbers for j in wanted])


def _choices(submit: pb.Submit) -> tuple[int, ...]:
    return tuple(submit.choices) or (0,)


async def _hold(seen: Seen, index: int) -> None:
    if 0 <= seen.plan.hold_at <= index:
        seen.held.set()
        await seen.released.wait()


def _finish(queue: Queue, submit: pb.Submit, stats: pb.LegStats, *, handed_off: bool) -> None:
    finished = pb.Finished(handle=submit.handle, attempt=submit.attempt, handed_off=handed_off, stats=stats)
    queue.put_nowait(pb.WorkerMessage(step=pb.StepReport(finished=[finished])))


def _fail(queue: Queue, of: pb.Submit | pb.Cancel, code: pb.ErrorCode.ValueType) -> None:
    failed = pb.Failed(handle=of.handle, attempt=of.attempt, code=code, message=f"scripted {pb.ErrorCode.Name(code)}",
                       retry_after_ms=5 if code == pb.ERROR_CODE_BUSY else 0)
    queue.put_nowait(pb.WorkerMessage(step=pb.StepReport(failed=[failed])))
