"""Talks to workers as a router does, over Worker.Session, with exact token ids; knows no HTTP and no text."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.block_hash import content_hash
from slipstream.rpc import convert
from slipstream.rpc.channel import connect
from slipstream.types import FinishReason, Grid, SamplingParams, StopParams
from slipstream.v1 import worker_pb2 as pb
from slipstream.v1 import worker_pb2_grpc

CHUNK_BYTES = 256 << 10
_handles = itertools.count(1)


@dataclass(kw_only=True)
class Prompt:
    """What is asked."""

    tokens: Sequence[int]
    max_tokens: int = 64
    pixels: Sequence[Any] = ()
    grids: Sequence[Grid] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choices: tuple[int, ...] = (0,)
    output: Sequence[int] = ()
    salt: str = ""
    fresh: bool = False
    """True: nothing of it is found in a cache, however often it is asked."""


@dataclass(kw_only=True)
class Leg:
    """What one worker said about one (handle, attempt)."""

    handle: int
    attempt: int
    tokens: dict[int, int] = field(default_factory=dict)
    """Of the first choice, by index."""
    others: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of the other choices, by choice and index."""
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    """By choice."""
    computed: pb.LegStats | None = None
    """Prefill's, told with its first tokens."""
    ends: list[pb.Finished | pb.Failed] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each token."""

    @property
    def end(self) -> pb.Finished | pb.Failed:
        """How it ended; exactly one way."""
        assert len(self.ends) == 1, f"{len(self.ends)} ends: {self.ends}"
        return self.ends[0]

    async def finished(self, seconds: float = 60) -> pb.Finished:
        """Wait for a good end."""
        await asyncio.wait_for(self.over.wait(), seconds)
        assert isinstance(self.end, pb.Finished), f"failed: {self.end}"
        return self.end

    async def failed(self, seconds: float = 60) -> pb.Failed:
        """Wait for a bad end."""
        await asyncio.wait_for(self.over.wait(), seconds)
        assert isinstance(self.end, pb.Failed), f"finished: {self.end}"
        return self.end

    async def token(self, index: int, seconds: float = 60) -> int:
        """Wait for output `index`."""
        async with asyncio.timeout(seconds):
            while index not in self.tokens:
                assert not self.over.is_set(), f"ended before output {index}: {self.ends}"
                self.news.clear()
                await self.news.wait()
        return self.tokens[index]


class Worker:
    """One worker's Session."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = connect(address)
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._legs: dict[tuple[int, int], Leg] = {}
        self.reports: list[pb.StepReport] = []
        self.load = pb.Load()
        self._loads = asyncio.Condition()
        self._beats = 0  # loads that came by themselves
        self.call: Any = None
        self._turn = asyncio.Lock()  # a stream takes one write at a time
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Ask who it is, then open the Session."""
        self.info = await self.stub.GetInfo(pb.GetInfoRequest(), timeout=20, wait_for_ready=True)
        self.call = self.stub.Session()
        self._reader = asyncio.create_task(self._read())
        await self.until(lambda: self._beats > 0)

    async def close(self) -> None:
        """Drop the Session and the connection."""
        if self.call is not None:
            self.call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def put(self, image: np.ndarray[Any, Any]) -> bytes:
        """Send a picture, or frames; its content hash."""
        data = image.tobytes()
        name = content_hash(image.shape[-3], image.shape[-2], data)

        async def chunks() -> AsyncIterator[pb.ImageChunk]:
            yield pb.ImageChunk(content_hash=name, height=image.shape[-3], width=image.shape[-2],
                                frames=len(image) if image.ndim == 4 else 0)
            for start in range(0, len(data), CHUNK_BYTES):
                yield pb.ImageChunk(data=data[start : start + CHUNK_BYTES])

        await self.stub.PutImage(chunks(), timeout=20)
        return name

    async def submit(self, submit: pb.Submit) -> Leg:
        """Send it; the leg collects what comes back."""
        key = (submit.handle, submit.attempt)
        leg = self._legs.setdefault(key, Leg(handle=key[0], attempt=key[1]))
        await self._write(pb.RouterMessage(submit=submit))
        return leg

    async def cancel(self, handle: int, attempt: int = 0) -> Leg:
        """Send Cancel."""
        leg = self._legs.setdefault((handle, attempt), Leg(handle=handle, attempt=attempt))
        await self._write(pb.RouterMessage(cancel=pb.Cancel(handle=handle, attempt=attempt)))
        return leg

    def leg(self, handle: int, attempt: int = 0) -> Leg:
        """One that was submitted."""
        return self._legs[handle, attempt]

    async def until_empty(self, seconds: float = 10) -> None:
        """Wait until the worker says, from now on and not in passing, that every block and slot is free."""
        info, before = self.info, self._beats

        def empty() -> bool:
            load = self.load
            owned = (info.total_blocks - load.free_blocks, info.total_state_slots - load.free_state_slots)
            return self._beats > before and (*owned, load.running, load.waiting, load.parked) == (0, 0, 0, 0, 0)

        await self.until(empty, seconds)

    async def until(self, condition: Any, seconds: float = 10) -> None:
        """Wait until `condition()` holds after some report of the load."""
        try:
            async with asyncio.timeout(seconds), self._loads:
                await self._loads.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"{self.info.replica_id} after {seconds} s: {self.load}") from None

    async def _write(self, message: pb.RouterMessage) -> None:
        async with self._turn:
            await asyncio.wait_for(self.call.write(message), 20)

    async def _read(self) -> None:
        async for message in self.call:
            is_step = message.WhichOneof("message") == "step"
            if is_step:
                self._take(message.step)
            async with self._loads:
                self.load = message.step.load if is_step else message.load
                self._beats += not is_step
                self._loads.notify_all()

    def _take(self, report: pb.StepReport) -> None:
        self.reports.append(report)
        for told in report.computed:
            assert not self._legs[told.handle, told.attempt].tokens, "late"
            self._legs[told.handle, told.attempt].computed = told.stats
        rows = zip(report.handle, report.attempt, report.choice, report.index, report.token, report.finish, strict=True)
        for handle, attempt, choice, index, token, finish in rows:
            leg = self._legs[handle, attempt]
            tokens = leg.tokens if choice == 0 else leg.others.setdefault(choice, {})
            assert index not in tokens, "a token came twice"
            assert not leg.ends, "a token after the end"
            assert choice not in leg.reasons, "a token after the last one of its choice"
            tokens[index] = token
            if (reason := convert.finish_from_pb(finish)) is not None:
                leg.reasons[choice] = reason
            leg.news.set()
        ends: list[pb.Finished | pb.Failed] = [*report.finished, *report.failed]
        for end in ends:
            leg = self._legs[end.handle, end.attempt]
            leg.ends.append(end)
            leg.over.set()
            leg.news.set()


@dataclass(kw_only=True)
class Answer:
    """A whole request."""

    tokens: list[int]
    reason: FinishReason | None
    prefill: pb.LegStats
    decode: pb.LegStats
    busy: int = 0
    """Times that the decode replica was busy."""
    others: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of the choices after choice 0."""


class Pair:
    """One prefill and one decode worker, used together."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill = prefill
        self.decode = decode

    async def submits(self, prompt: Prompt, *, name: str = "", seconds: float = 60) -> tuple[pb.Submit, pb.Submit]:
        """Send the pictures; the Submits for both legs."""
        submit = pb.Submit(handle=next(_handles), request_id=name or f"request-{uuid.uuid4().hex[:8]}",
                           transfer_id=uuid.uuid4().hex, tokens=prompt.tokens, remaining_ms=int(seconds * 1000),
                           sampling=convert.sampling_to_pb(prompt.sampling), choices=prompt.choices, output=prompt.output,
                           cache_salt=uuid.uuid4().hex if prompt.fresh else prompt.salt)
        convert.stop_to_pb(StopParams(max_tokens=prompt.max_tokens, stop_token_ids=prompt.stop_ids,
                                      ignore_eos=prompt.ignore_eos), submit)
        for image, grid in zip(prompt.pixels, prompt.grids, strict=True):
            submit.images.append(convert.image_to_pb(await self.prefill.put(image), grid))
        decode = pb.Submit()
        decode.CopyFrom(submit)
        decode.prefill_addresses[:] = self.prefill.info.cache_store_addresses
        decode.prefill_epoch = self.prefill.info.epoch
        return submit, decode

    async def ask(self, prompt: Prompt, *, seconds: float = 60) -> Answer:
        """The whole answer; a busy decode replica is asked again."""
        to_prefill, to_decode = await self.submits(prompt, seconds=seconds)
        one = await self.prefill.submit(to_prefill)
        other = await self.decode.submit(to_decode)
        busy = 0
        while True:
            await asyncio.wait_for(other.over.wait(), seconds)
            if not isinstance(other.end, pb.Failed) or other.end.code != pb.ERROR_CODE_BUSY:
                break
            busy += 1
            assert other.end.retry_after_ms > 0
            await asyncio.sleep(other.end.retry_after_ms / 1000)
            to_decode.attempt += 1
            other = await self.decode.submit(to_decode)
        first, last = await one.finished(seconds), await other.finished(seconds)
        assert one.computed == first.stats, "what prefill did is known before it has ended"
        begin = len(prompt.output)
        found: dict[int, list[int]] = {}
        for choice in prompt.choices:
            ours, theirs = ((leg.tokens if choice == 0 else leg.others.get(choice, {})) for leg in (one, other))
            tokens = ours | theirs
            assert sorted(tokens) == list(range(begin, begin + len(tokens))), "no gap and no double"
            assert not ours.keys() & theirs.keys()
            found[choice] = [tokens[index] for index in sorted(tokens)]
        reasons = one.reasons | other.reasons
        assert reasons.keys() == set(prompt.choices), "every choice has an end"
        return Answer(tokens=found.pop(prompt.choices[0]), reason=reasons[prompt.choices[0]], others=found,
                      prefill=first.stats, decode=last.stats, busy=busy)

    async def until_empty(self, seconds: float = 10) -> None:
        """Wait until nothing is left on both."""
        await asyncio.gather(self.prefill.until_empty(seconds), self.decode.until_empty(seconds))


@asynccontextmanager
async def pair(prefill: str, decode: str) -> AsyncIterator[Pair]:
    """Sessions to both workers."""
    workers = Worker(prefill), Worker(decode)
    try:
        for worker in workers:
            await worker.open()
        yield Pair(*workers)
    finally:
        for worker in workers:
            await worker.close()
