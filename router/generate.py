"""Runs one request's Dispatch on real workers and hands its tokens to one reader. Knows no HTTP and no text."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from router.actions import (
    Action,
    CancelLeg,
    ChoiceEnd,
    End,
    LegStats,
    Resume,
    RetryDecode,
    Row,
    Submit,
    Tokens,
)
from router.dispatch import Dispatch
from router.doubts import Doubts
from router.legs import Ears, first_of
from router.link import WorkerLink
from router.policies import PrefixLoad, another_decode
from router.policy import Replica
from router.request import RUN_MARK, Bounds, GenerateRequest, Output, Times
from router.routing import Routing
from router.turns import FAILED, LATE, CacheLoad
from router.workers import Workers
from slipstream.errors import (
    CancelledError,
    DeadlineError,
    InternalError,
    ProtocolError,
    SlipstreamError,
    SlowClientError,
    UnavailableError,
)
from slipstream.observability.metrics import RouterMetrics
from slipstream.types import PromptLogprobs, Role
from slipstream.v1 import worker_pb2

logger = logging.getLogger(__name__)

TOKEN_BYTES = 4
"""Unread output is counted as token ids, and logprobs with their ids."""
LOGPROB_BYTES = 8
LOOK_SECONDS = 1.0
"""How often a request that waits for replicas looks again, if it hears nothing of them."""


@dataclass(eq=False, kw_only=True)
class _Run:
    """Where a run is carried out."""

    pair: dict[Role, Replica]
    """Decode alone: it computes the prompt too."""
    handle: int
    tokens: int
    """Of the prompt, those that are probably not cached where it is computed."""
    load: PrefixLoad | None = None
    """Goes before."""
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    """Of its transfer's id, which opens the prompt's KV: the request's own id is in the client's hands."""
    busy: set[str] = field(default_factory=set)


class Generation:
    """One request in flight. Read it with `next` until an Output has an end; `close` in any case."""

    def __init__(self, request: GenerateRequest, workers: Workers, routing: Routing, metrics: RouterMetrics, times: Times,
                 next_handle: Callable[[], int], bounds: Bounds) -> None:
        self.request = request
        self.times = times
        self.dispatch = Dispatch(range(request.choices), bounds.max_resumes)
        self.output_tokens = 0
        """So far, of all choices."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """If they are wanted: before the first token of any choice."""
        self._workers = workers
        self._routing = routing
        self._wanted = routing.wanted(request.id, request.prompt, request.cache_salt, request.choices)
        self._metrics = metrics
        self._bounds = bounds
        self._next_handle = next_handle
        self._runs: dict[int, _Run] = {}
        self._doubts = Doubts()
        self._unread: list[Tokens | ChoiceEnd] = []
        self._unread_bytes = 0
        self._actions = deque[Action]()
        self._acting = False
        self._end: End | None = None
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Choose the pair and submit to both. Raises UnavailableError if there is none."""
        self._place(0)
        self._later(max(0.0, self.request.deadline - time.monotonic()),
                    lambda: self.give_up(DeadlineError("the request's deadline passed")))
        if self._runs[0].load is None:
            self._begin(0)
        else:
            self._spawn(self._load_and_begin(0))

    async def next(self) -> Output:
        """Wait for news and take them."""
        while not self._unread and self._end is None:
            self._changed.clear()
            await self._changed.wait()
        news, self._unread, self._unread_bytes = tuple(self._unread), [], 0
        return Output(news=news, end=self._end)

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

    def enough(self, choice: int) -> None:
        """The reader found a stop string: nothing more of the choice is wanted."""
        self.act(self.dispatch.enough(choice))

    def close(self) -> None:
        """The reader is gone. Cancels what still runs."""
        self.give_up(CancelledError("the client went away"))
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    def leg_told(self, run: int, role: Role, attempt: int, rows: Sequence[Row]) -> None:
        """A worker reports tokens; a report without the logprobs that were asked for is a failure of the worker."""
        if self._wants_scores(run, role):
            prompts = [row.prompt for row in rows if row.prompt is not None and self.request.is_whole(row.prompt)]
            self.prompt_logprobs = prompts[0] if prompts else None
        if self._wants_scores(run, role) or not self.request.is_sound(rows):
            self._breaks(run, role, ProtocolError(f"a {role.value} replica reported a token without the logprobs that it was "
                                                  "asked for; update it"))
        else:
            self.act(self.dispatch.tokens(run, role, attempt, rows))

    def _wants_scores(self, run: int, role: Role) -> bool:
        """True if the logprobs of the prompt are to come from this leg, which computes it."""
        wanted = self.request.prompt_logprobs is not None and self.prompt_logprobs is None
        return wanted and (role is Role.PREFILL or Role.PREFILL not in self._runs[run].pair)

    def leg_computed(self, run: int, role: Role, attempt: int, stats: LegStats) -> None:
        """A worker says what a leg did; its end comes later."""
        self.dispatch.computed(run, role, attempt, stats)

    def leg_finished(self, run: int, role: Role, attempt: int, stats: LegStats, *, handed_off: bool) -> None:
        """A worker says that a leg ended well."""
        self._note("leg ended", run=run, leg=role.value, attempt=attempt, cached_tokens=stats.cached_tokens,
                   queue_seconds=stats.queue_seconds, compute_seconds=stats.compute_seconds,
                   transfer_seconds=stats.transfer_seconds)
        self._workers.breakers.succeeded(self._runs[run].pair[role].id)
        self.act(self.dispatch.finished(run, role, attempt, stats, handed_off=handed_off))

    def leg_failed(self, run: int, role: Role, attempt: int, error: SlipstreamError) -> None:
        """A worker says so, or was lost."""
        if known := self._runs.get(run):
            self._doubt(known, role, error)
            self._workers.breakers.failed(known.pair[role].id, role, error)
        self._note("leg failed", run=run, leg=role.value, attempt=attempt, code=error.code, message=error.message)
        self.act(self.dispatch.failed(run, role, attempt, error, random.uniform(0.5, 1.0)))

    def act(self, actions: Sequence[Action]) -> None:
        """Carry out what the state machine decided, in the order of its decisions: an action that leads to others, such as a
        Submit that nobody takes, has them wait behind those that were decided before."""
        self._actions.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._actions:
                self._carry_out(self._actions.popleft())
        finally:
            self._acting = False

    def _carry_out(self, action: Action) -> None:
        match action:
            case Submit():
                self._submit(action)
            case CancelLeg():
                self._cancel(action)
            case RetryDecode():
                self._metrics.decode_retries.inc()
                run = self._runs[action.run]
                run.busy.add(run.pair[Role.DECODE].id)
                self._later(action.seconds, partial(self._retry, action.run))
            case Resume():
                self._metrics.resumes.labels(action.error.code).inc()
                self._note("resume", run=action.run, after_tokens=self.output_tokens, code=action.error.code)
                logger.info("resuming after %d tokens: %s", self.output_tokens, action.error.message,
                            extra={"request_id": self.request.id})
                self._spawn(self._resume(action))
            case Tokens():
                self._take(action)
            case ChoiceEnd():
                self._unread.append(action)
                self._changed.set()
            case End():
                self.times.ended = time.monotonic()
                self._note("ended", code="ok" if action.error is None else action.error.code, output_tokens=self.output_tokens)
                self._end = action
                self._changed.set()
                self._over.set()

    def _take(self, action: Tokens) -> None:
        now, count, wanted = time.monotonic(), len(action.tokens), self.request.sampling.logprobs
        if self.times.first_token is None:
            self.times.first_token = now
            self._metrics.ttft.observe(now - self.times.arrived)
        if (last := self.times.last_token.get(action.choice)) is not None:
            self._metrics.itl.observe(now - last)
        self.times.last_token[action.choice] = now
        self._metrics.output_tokens.inc(count)
        self.output_tokens += count
        self._unread.append(action)
        self._unread_bytes += count * (TOKEN_BYTES if wanted is None else TOKEN_BYTES + LOGPROB_BYTES * (1 + wanted))
        self._changed.set()
        if self._unread_bytes > self._bounds.unread_bytes:
            self._unread.clear()
            self.give_up(SlowClientError(f"more than {self._bounds.unread_bytes} bytes of output were left unread; read "
                                         "faster"))

    # Runs ----------------------------------------------------------------------------------------------------------------

    def _place(self, run: int) -> None:
        """Choose a pair for a run, of the least doubtful ones. Raises UnavailableError."""
        handle = self._next_handle()
        doubts = self._doubts.levels(self._workers.breakers.open())
        decision = self._routing.place(self._wanted, self._workers.views(), turn=handle, doubts=doubts,
                                       output=self.dispatch.output(run), whole=self._wants_scores(run, Role.PREFILL))
        pair = {Role.DECODE: decision.decode} | ({Role.PREFILL: decision.prefill} if decision.prefill is not None else {})
        self._runs[run] = _Run(pair=pair, handle=handle, tokens=decision.computed_tokens, load=decision.load)

    async def _resume(self, action: Resume) -> None:
        """Begin a new run as soon as there are replicas for it; none for too long ends the request."""
        await asyncio.sleep(action.seconds)
        until = time.monotonic() + self._bounds.resume_wait_seconds
        while self.dispatch.wants(action.run):
            try:
                self._place(action.run)
                break
            except UnavailableError as error:
                if time.monotonic() > until:
                    self.give_up(error)
                    return
            await self._workers.change(LOOK_SECONDS)
        else:
            return
        await self._load_and_begin(action.run)

    async def _load_and_begin(self, number: int) -> None:
        """What prefill lacks and decode has goes first, if that was decided."""
        run = self._runs[number]
        if run.load is not None:
            run.tokens -= await self._load(self.request.asked(self._name(number), self.dispatch.output(number)), run, run.load)
        self._begin(number)

    async def _load(self, prompt: worker_pb2.Submit, run: _Run, load: PrefixLoad) -> int:
        """How many tokens it brought."""
        seconds = min(self._routing.load_seconds, self.request.deadline - time.monotonic())
        target, began = run.pair[Role.PREFILL], time.monotonic()
        try:
            loading = CacheLoad(prompt, self._next_handle(), self._workers.link(load.source.id), self._workers.link(target.id),
                                seconds)
        except UnavailableError:
            return 0  # one has just left
        try:
            await loading.run()
        finally:
            told = loading.outcome
            self._metrics.cache_loads.labels(told.outcome).inc()
            self._metrics.loaded_tokens.inc(told.stats.cached_tokens)
            self._note("load", outcome=told.outcome, message=told.message, load_from=load.source.name,
                       tokens=told.stats.cached_tokens, kv_bytes=told.stats.kv_bytes, state_bytes=told.stats.state_bytes,
                       took_seconds=time.monotonic() - began)
        if told.outcome in (FAILED, LATE):
            self._routing.load_failed(load.source.id, target.id)
        return told.stats.cached_tokens

    def _begin(self, number: int) -> None:
        local = Role.PREFILL not in self._runs[number].pair
        self.act(self.dispatch.begin(number, local=local) if number else self.dispatch.start(local=local))
        self._bring_pictures(number)

    def _name(self, number: int) -> str:
        """Of a run, as workers know it."""
        return f"{self.request.id}{RUN_MARK}{number}" if number else self.request.id

    def _submit(self, action: Submit) -> None:
        run = self._runs[action.run]
        message = self.request.message(action, handle=run.handle, name=self._name(action.run), secret=run.secret,
                                       scores=self._wants_scores(action.run, action.role))
        asked = action.role
        try:
            if asked is Role.DECODE and not action.local:
                asked = Role.PREFILL
                source = self._workers.link(run.pair[asked].id).connected()
                message.prefill_addresses.extend(source.cache_store_addresses)
                message.prefill_epoch = source.epoch
                asked = action.role
            computes = run.tokens if asked is Role.PREFILL or action.local else 0
            self._workers.link(run.pair[asked].id).submit(message, Ears(action.run, asked, self), computes)
            self._workers.breakers.sent(run.pair[asked].id)
        except SlipstreamError as error:
            self._breaks(action.run, asked, error)

    def _cancel(self, action: CancelLeg) -> None:
        run = self._runs[action.run]
        try:
            self._workers.link(run.pair[action.role].id).cancel(run.handle, action.attempt)
        except SlipstreamError:
            logger.debug("the %s worker left before it was told of a cancel", action.role.value)

    def _retry(self, number: int) -> None:
        """Another decode replica, or the same again if there is no other."""
        if self.dispatch.over:
            return
        run = self._runs[number]
        try:
            replica = another_decode(self._workers.views(), run.pair.get(Role.PREFILL), turn=run.handle,
                                     not_now=run.busy | self._workers.breakers.open())
        except SlipstreamError as error:
            self.act(self.dispatch.broken(number, error))
            return
        if replica.id in run.busy:  # everybody was asked: begin again
            run.busy.clear()
        run.pair[Role.DECODE] = replica
        self._routing.goes_to(self._wanted, replica, time.monotonic())
        self._note("decode again", run=number, decode=replica.name)
        self.act(self.dispatch.retry(number))

    def _bring_pictures(self, number: int) -> None:
        if self.request.prompt.pictures and not self.dispatch.over:
            self._spawn(self._send_pictures(number))

    async def _send_pictures(self, number: int) -> None:
        """All at once; the first that is not taken stops the others and breaks the run."""
        try:
            link: WorkerLink = self._workers.link(self._runs[number].pair[Role.PREFILL].id)
            async with asyncio.TaskGroup() as group:
                for picture in {picture.content_hash: picture for picture in self.request.prompt.pictures}.values():
                    seconds = max(0.001, self.request.deadline - time.monotonic())
                    group.create_task(link.put_image(picture, self.request.id, seconds))
        except* SlipstreamError as errors:
            self._breaks(number, Role.PREFILL, first_of(errors))

    def _breaks(self, run: int, by: Role, error: SlipstreamError) -> None:
        """A run cannot go on, and its legs do not know it."""
        self._doubt(self._runs[run], by, error)
        self.act(self.dispatch.broken(run, error))

    def _doubt(self, run: _Run, by: Role, error: SlipstreamError) -> None:
        peer = run.pair.get(Role.PREFILL if by is Role.DECODE else Role.DECODE)
        self._doubts.failed(run.pair[by].id, peer.id if peer else None, error)

    def _note(self, what: str, **facts: object) -> None:
        self._wanted.trace.add(time.monotonic(), what, **facts)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                logger.exception("a request could not be carried on", extra={"request_id": self.request.id})
                self.give_up(InternalError("a fault of the router ended the request; its log has more"))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, what))
