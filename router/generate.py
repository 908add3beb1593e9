"""Runs one request's Dispatch on real workers and hands its tokens to one reader. Knows no HTTP and no text."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from router import policy
from router.dispatch import Action, CancelLeg, Dispatch, End, LegStats, RetryDecode, Submit, Tokens
from router.prompt import Prompt
from router.workers import WorkerLink, Workers
from slipstream.errors import CancelledError, DeadlineError, InternalError, ProtocolError, SlipstreamError, SlowClientError
from slipstream.observability.metrics import RouterMetrics
from slipstream.rpc import convert
from slipstream.types import FinishReason, Logprobs, Role, SamplingParams, StopParams
from slipstream.v1 import worker_pb2

logger = logging.getLogger(__name__)

TOKEN_BYTES = 4
"""Unread output is counted as token ids, and logprobs with their ids."""
LOGPROB_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What the workers are asked for."""

    id: str
    handle: int
    prompt: Prompt
    sampling: SamplingParams
    stop: StopParams
    deadline: float
    """time.monotonic()."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What has come since the reader last looked."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    """One per token, if the request asked for them."""
    end: End | None = None


@dataclass(kw_only=True)
class Times:
    """time.monotonic() of a request's milestones."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


@dataclass(eq=False)
class _Sink:
    """One leg's ears."""

    role: Role
    generation: Generation

    def on_tokens(self, attempt: int, rows: Sequence[tuple[int, int]], logprobs: Mapping[int, Logprobs]) -> None:
        self.generation.act(self.generation.dispatch.tokens(self.role, attempt, rows, logprobs))

    def on_finished(self, message: worker_pb2.Finished) -> None:
        stats = message.stats
        self.generation.act(self.generation.dispatch.finished(
            self.role, message.attempt, None if message.handed_off else convert.finish_from_pb(message.reason),
            LegStats(queue_seconds=stats.queue_seconds, compute_seconds=stats.compute_seconds,
                     transfer_seconds=stats.transfer_seconds, kv_bytes=stats.kv_bytes, state_bytes=stats.state_bytes,
                     cached_tokens=stats.cached_tokens)))

    def on_failed(self, attempt: int, error: SlipstreamError) -> None:
        self.generation.act(self.generation.dispatch.failed(self.role, attempt, error, random.uniform(0.5, 1.0)))

    def on_fault(self, error: SlipstreamError) -> None:
        self.generation.give_up(error)


@dataclass(eq=False)
class Generation:
    """One request in flight. Read it with `next` until an Output has an end; `close` in any case."""

    request: GenerateRequest
    workers: Workers
    metrics: RouterMetrics
    turn: int
    unread_bytes: int
    times: Times
    dispatch: Dispatch = field(default_factory=Dispatch)
    output_tokens: int = 0
    """So far."""
    _pair: dict[Role, policy.Replica] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)
    _unread: deque[int] = field(default_factory=deque)
    _unread_logprobs: list[Logprobs] = field(default_factory=list)
    _end: End | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)
    _pictures: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Choose the pair and submit to both. Raises UnavailableError if there is none."""
        pair = policy.choose(self.workers.views(), turn=self.turn)
        self._pair = {Role.PREFILL: pair.prefill, Role.DECODE: pair.decode}
        self._later(max(0.0, self.request.deadline - time.monotonic()),
                    lambda: self.give_up(DeadlineError("the request's deadline passed")))
        self.act(self.dispatch.start())
        if self.request.prompt.pictures and not self.dispatch.over:
            self._pictures = asyncio.create_task(self._send_pictures(self.workers.link(pair.prefill.id)))

    async def next(self) -> Output:
        """Wait for news and take them."""
        while not self._unread and self._end is None:
            self._changed.clear()
            await self._changed.wait()
        tokens, self._unread = tuple(self._unread), deque()
        logprobs, self._unread_logprobs = tuple(self._unread_logprobs), []
        return Output(tokens=tokens, logprobs=logprobs, end=self._end)

    async def wait(self) -> None:
        """Until it has ended, whether or not somebody reads it."""
        await self._over.wait()

    @property
    def end(self) -> End | None:
        """How it ended, once it has."""
        return self._end

    def give_up(self, error: SlipstreamError) -> None:
        """End it with an error: the client left, or the deadline passed."""
        self.act(self.dispatch.give_up(error))

    def enough(self) -> None:
        """The reader found a stop string: nothing more is wanted."""
        self.act(self.dispatch.enough(FinishReason.STOP))

    def close(self) -> None:
        """The reader is gone. Cancels what still runs."""
        self.give_up(CancelledError("the client went away"))
        for timer in self._timers:
            timer.cancel()
        if self._pictures is not None:
            self._pictures.cancel()

    def act(self, actions: Sequence[Action]) -> None:
        """Carry out what the state machine decided."""
        for action in actions:
            match action:
                case Submit():
                    self._submit(action)
                case CancelLeg():
                    self._cancel(action)
                case RetryDecode():
                    self.metrics.decode_retries.inc()
                    self._busy.add(self._pair[Role.DECODE].id)
                    self._later(action.seconds, self._retry)
                case Tokens():
                    self._take(action)
                case End():
                    self.times.ended = time.monotonic()
                    self._end = action
                    self._changed.set()
                    self._over.set()

    def _take(self, action: Tokens) -> None:
        now, tokens, wanted = time.monotonic(), action.tokens, self.request.sampling.logprobs
        if wanted is not None and len(action.logprobs) != len(tokens):
            self.give_up(ProtocolError("a replica left out the logprobs that it was asked for; update it"))
            return
        if wanted is not None:
            self._unread_logprobs += action.logprobs
        if self.times.first_token is None:
            self.times.first_token = now
            self.metrics.ttft.observe(now - self.times.arrived)
        elif self.times.last_token is not None:
            self.metrics.itl.observe(now - self.times.last_token)
        self.times.last_token = now
        self.metrics.output_tokens.inc(len(tokens))
        self.output_tokens += len(tokens)
        self._unread.extend(tokens)
        self._changed.set()
        size = TOKEN_BYTES if wanted is None else TOKEN_BYTES + LOGPROB_BYTES * (1 + wanted)
        if len(self._unread) * size > self.unread_bytes:
            self._unread.clear()
            self._unread_logprobs.clear()
            self.give_up(SlowClientError(f"more than {self.unread_bytes} bytes of output were left unread; read faster"))

    def _submit(self, action: Submit) -> None:
        request = self.request
        message = worker_pb2.Submit(
            handle=request.handle, request_id=request.id, attempt=action.attempt, transfer_id=f"{request.id}/{request.handle}",
            tokens=request.prompt.tokens, sampling=convert.sampling_to_pb(request.sampling),
            remaining_ms=max(1, int((request.deadline - time.monotonic()) * 1000)))
        convert.stop_to_pb(request.stop, message)
        try:
            if action.role is Role.PREFILL:
                message.images.extend(convert.image_to_pb(picture.content_hash, picture.grid)
                                      for picture in request.prompt.pictures)
            else:
                source = self.workers.link(self._pair[Role.PREFILL].id).info
                if source is not None:
                    message.prefill_addresses.extend(source.cache_store_addresses)
                    message.prefill_epoch = source.epoch
            self.workers.link(self._pair[action.role].id).submit(message, _Sink(action.role, self))
        except SlipstreamError as error:
            self.act(self.dispatch.failed(action.role, action.attempt, error))

    def _cancel(self, action: CancelLeg) -> None:
        try:
            self.workers.link(self._pair[action.role].id).cancel(self.request.handle, action.attempt)
        except SlipstreamError:
            logger.debug("the %s worker left before it was told of a cancel", action.role.value)

    def _retry(self) -> None:
        """Another decode replica, or the same again if there is no other."""
        if self.dispatch.over:
            return
        try:
            replica = policy.another_decode(self.workers.views(), self._pair[Role.PREFILL].compatibility_hash,
                                            not_now=self._busy, turn=self.turn)
        except SlipstreamError as error:
            self.give_up(error)
            return
        if replica.id in self._busy:  # everybody was asked: begin again
            self._busy.clear()
        self._pair[Role.DECODE] = replica
        self.act(self.dispatch.retry())

    async def _send_pictures(self, link: WorkerLink) -> None:
        """All at once; the first that is not taken stops the others and ends the request."""
        try:
            async with asyncio.TaskGroup() as group:
                for picture in {picture.content_hash: picture for picture in self.request.prompt.pictures}.values():
                    seconds = max(0.001, self.request.deadline - time.monotonic())
                    group.create_task(link.put_image(picture, self.request.id, seconds))
        except* SlipstreamError as errors:
            self.give_up(first_of(errors))
        except* Exception:
            logger.exception("the pictures of a request could not be sent", extra={"request_id": self.request.id})
            self.give_up(InternalError("a fault of the router kept a picture from its worker; its log has more"))

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, partial(what)))


def first_of(errors: BaseExceptionGroup[SlipstreamError]) -> SlipstreamError:
    """The first single error of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SlipstreamError)
    return error
