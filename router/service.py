"""What a router is: prompts in, generations out, counted and limited. Knows neither HTTP nor the public gRPC API, its users."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from router import keys, policy, reasoning
from router.admission import ANYBODY, Client, Turn
from router.answer import Answer
from router.breaker import Breakers
from router.fetch import Fetcher
from router.generate import Generation
from router.inspect import describe, inspect
from router.limits import Limits
from router.openai import ChatRequest, CompletionRequest, Options
from router.prompt import PictureBytes, Prompt, PromptBuilder, Share, media_of
from router.record import record
from router.request import Bounds, GenerateRequest, Times
from router.routing import Routing
from router.schemas import Schemas
from router.stream import TextStream
from router.workers import Workers
from slipstream import checkpoint as checkpoints
from slipstream.config import Config, hub_cache
from slipstream.errors import DeadlineError, InvalidRequestError, ModelNotFoundError, UnavailableError
from slipstream.observability.metrics import RouterMetrics
from slipstream.observability.record import Recorder
from slipstream.rpc import convert
from slipstream.rpc.security import OPEN, Security
from slipstream.text.images import Still
from slipstream.text.videos import Frames
from slipstream.types import Grammar, Role, StopParams

logger = logging.getLogger(__name__)

PROMPT_THREADS = 2
LAST_WORDS_SECONDS = 1.0
"""For the errors of requests that a stop cuts off to reach their clients."""
_SEED_BITS = 63
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One admitted request."""

    id: str
    """Ours, unique; what the client may have called it is only logged."""
    options: Options
    generation: Generation
    texts: tuple[TextStream, ...]
    """By choice."""
    prompt_tokens: int
    share: Share
    turn: Turn
    answers: tuple[Answer, ...] = ()
    """By choice, of a chat."""
    echo: str = ""
    """What the client wants before the text."""


class RouterService:
    """One per process. `start` on the event loop, `close` at the end."""

    def __init__(self, config: Config, security: Security = OPEN) -> None:
        """Raises ConfigError and CheckpointError."""
        self.config = config
        self.checkpoint = checkpoints.read(checkpoints.resolve(config.model.path, hub_cache()))
        self.model_name = config.model.name
        limit = self.checkpoint.max_context
        self._own_context = min(config.engine.max_context or limit, limit)
        self.builder = PromptBuilder(self.checkpoint, config.router)
        self.metrics = RouterMetrics(CollectorRegistry())
        self.limits = Limits(config.router, self._limits_changed)
        self.keys = keys.load(config.router.keys_file)
        self._pictures = PictureBytes(config.router.max_pictures_bytes)
        self._recorder = (Recorder(Path(config.debug.record_dir), "router", config.debug.record_bytes)
                          if config.debug.record_dir else None)
        self.draining = False
        self._missing = ""  # when a worker last came or went
        self.created = int(time.time())
        self._fetcher = Fetcher(config.router.fetch)
        self.grpc_address = ""
        """Where the public gRPC API listens."""
        self._threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="prompt")
        self._thread_free = asyncio.Semaphore(PROMPT_THREADS)
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[Generation] = set()
        self.schemas = Schemas(self.checkpoint, config.router.max_schema_bytes, config.router.schema_seconds)
        breakers = Breakers(config.router.breaker_failures, config.router.breaker_seconds,
                            lambda role: self.metrics.breakers.labels(role.value).inc())
        self.routing = Routing(config.router, self.checkpoint, self.metrics)
        self.workers = Workers(self.model_name, self._workers_changed, config.router.worker_silence_seconds, security,
                               self.routing.index, breakers)

    @property
    def max_context(self) -> int:
        """Tokens that every connected worker can hold of one request."""
        infos = [link.info for link in self.workers.links() if link.info is not None]
        limits = [info.max_context for info in infos]
        limits += [info.total_blocks * info.block_size for info in infos if info.role == convert.role_to_pb(Role.DECODE)]
        return min([self._own_context, *(limit for limit in limits if limit)])

    def _context(self, options: Options, prompt: Prompt) -> int:
        """Context of one choice. All of a request, which share the prompt's whole blocks, must fit on a decode replica at once:
        who names no max_tokens gets what is left for each."""
        if options.max_tokens is not None:
            return self.max_context
        n, rooms = options.n, [self.max_context]
        for info in (link.info for link in self.workers.links()):
            if info is not None and info.role == convert.role_to_pb(Role.DECODE) and info.total_blocks:
                shared = len(prompt.tokens) // info.block_size
                rooms.append((info.total_blocks + (n - 1) * shared) // n * info.block_size)
        return min(rooms)

    async def close(self) -> None:
        """End every connection."""
        await self.workers.close()
        await self.schemas.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> int:
        """Take nothing new and wait for what runs; the number of requests that the time cut off."""
        self.draining = True
        try:
            async with asyncio.timeout(self.config.router.drain_seconds):
                await self._idle.wait()
            return 0
        except TimeoutError:
            cut_off = self.limits.in_flight
        logger.warning("%d requests are cut off by the end of the drain", cut_off)
        for generation in list(self._running):
            generation.give_up(UnavailableError("the router stopped before the request ended; send it again",
                                                retry_after_seconds=1.0))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), LAST_WORDS_SECONDS)
        return cut_off

    def problem(self) -> str:
        """Why no request can be served now, or empty."""
        if self.draining:
            return "the router is draining"
        reason = self.routing.missing(self.workers.views())
        refused = [link.problem for link in self.workers.links() if link.info is None and link.problem]
        refused += [f"{one.replica_id} is restarting: {one.problem}" for one in self.workers.restarting]
        return f"{reason} ({'; '.join(refused[:3])})" if reason and refused else reason

    async def begin_chat(self, request: ChatRequest, name: str, deadline: float, client: Client = ANYBODY) -> Ticket:
        """Raises the SlipstreamError that refuses the request."""
        build = partial(self.builder.chat, request.messages, tools=request.tools.shown, values=request.template)
        ticket = await self._begin(request.options, build, name, deadline, client, media_of(request.messages))
        opened = ticket.generation.request.prompt.opens_thinking
        return replace(ticket, answers=tuple(self._answer(request, opened) for _ in ticket.texts))

    def _answer(self, request: ChatRequest, opened: bool) -> Answer:
        if not self.builder.thinks:
            return Answer(request.tools, None, None)
        begin, end = (self.builder.tokenizer.token_id(mark) for mark in (reasoning.OPEN, reasoning.CLOSE))
        count = None if end is None else reasoning.ThinkCount(begin, end, opened=opened)
        return Answer(request.tools, reasoning.ThinkSplitter(opened=opened), count)

    async def begin_completion(self, request: CompletionRequest, name: str, deadline: float,
                               client: Client = ANYBODY) -> Ticket:
        """Raises the SlipstreamError that refuses the request."""
        prompt = request.prompt
        ticket = await self._begin(
            request.options, lambda take: self.builder.text(prompt) if isinstance(prompt, str) else self.builder.ids(prompt),
            name, deadline, client)
        if not request.echo:
            return ticket
        if isinstance(prompt, str) and request.options.echo_logprobs is None:
            return replace(ticket, echo=prompt)
        return replace(ticket, echo=self.builder.tokenizer.words(ticket.generation.request.prompt.tokens))

    async def tokens(self, model: str, build: Callable[[Callable[[int], None]], Prompt], deadline: float,
                     client: Client = ANYBODY) -> tuple[int, ...]:
        """Of a prompt that is built and not computed. Raises the SlipstreamError that refuses it."""
        self.check_model(model)
        turn = self.limits.enter(client, 0)
        share = Share(self._pictures)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return (await self._build(partial(build, share.take))).tokens
        except TimeoutError as error:
            raise DeadlineError("the request's deadline passed while its prompt was prepared") from error
        finally:
            share.close()
            self.limits.leave(turn)

    def check_model(self, model: str) -> None:
        """Raises ModelNotFoundError for another than ours."""
        if model != self.model_name:
            raise ModelNotFoundError(f"the model that was asked for is not served here; this router serves {self.model_name}",
                                     field="model")

    def end(self, ticket: Ticket) -> None:
        """The reader is done with it, however it ended. Call exactly once."""
        ticket.generation.close()
        ticket.share.close()
        self._running.discard(ticket.generation)
        self.limits.leave(ticket.turn, ticket.generation.output_tokens)
        self._account(ticket.generation)

    async def _begin(self, options: Options, build: Callable[[Callable[[int], None]], Prompt], name: str,
                     deadline: float, client: Client, media: Sequence[Still | Frames] = ()) -> Ticket:
        arrived = time.monotonic()
        self.check_model(options.model)
        if reason := self.problem():
            raise policy.refusal(reason)
        turn = self.limits.enter(client, options.priority)
        generation: Generation | None = None
        share = Share(self._pictures)
        try:
            async with asyncio.timeout(max(0.0, deadline - arrived)):
                if options.grammar is not None:
                    await self.schemas.check(options.grammar)
                self.builder.admit(media)
                await self._fetcher.fill(media, share.take)
                prompt = await self._build(partial(build, share.take))
                generation = self._generation(options, prompt, name, arrived, deadline)
                await self.limits.wait(turn, prompt_tokens=len(prompt.tokens),
                                       most_output=options.n * generation.request.stop.max_tokens)
            self._running.add(generation)
            generation.start()
        except BaseException as error:
            share.close()
            if generation is not None:
                self._running.discard(generation)
                generation.close()
            if isinstance(error, TimeoutError):
                raise DeadlineError("the request's deadline passed before it began") from error
            raise
        finally:
            if generation not in self._running:
                self.limits.leave(turn)
        self.metrics.prompt_tokens.inc(len(prompt.tokens))
        hidden = generation.request.stop.stop_token_ids
        texts = tuple(TextStream(self.builder.tokenizer, options.stop, hidden, options.min_tokens) for _ in range(options.n))
        return Ticket(id=name, options=options, generation=generation, prompt_tokens=len(prompt.tokens), texts=texts,
                      share=share, turn=turn)

    async def _build(self, build: Callable[[], Prompt]) -> Prompt:
        """On a thread, in turn. Whoever gives up before its turn leaves nothing behind; who does later keeps its thread for the
        picture that is being decoded."""
        loop = asyncio.get_running_loop()
        await self._thread_free.acquire()
        try:
            future = self._threads.submit(build)
        except BaseException:
            self._thread_free.release()
            raise

        def done(_: Future[Prompt]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the router has ended
                loop.call_soon_threadsafe(self._thread_free.release)

        future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    def _generation(self, options: Options, prompt: Prompt, name: str, arrived: float, deadline: float) -> Generation:
        eos = frozenset() if options.ignore_eos else self.checkpoint.eos_token_ids
        sampling = replace(self.checkpoint.sampling, **{"seed": secrets.randbits(_SEED_BITS), **options.sampling})
        if unknown := [token for token, _ in sampling.logit_bias if token >= self.checkpoint.vocab_size]:
            raise InvalidRequestError(f"logit_bias names token {unknown[0]}; the vocabulary has {self.checkpoint.vocab_size}",
                                      field="logit_bias")
        wanted = None if options.max_tokens is None else max(1, options.max_tokens)  # no prompt is computed without a token
        max_tokens = self.builder.max_tokens(prompt, wanted, self._context(options, prompt))
        self._check_scores(options, prompt)
        if options.min_tokens > max_tokens:
            raise InvalidRequestError(f"min_tokens is {options.min_tokens}; there is room for {max_tokens} tokens",
                                      field="min_tokens")
        request = GenerateRequest(
            id=name, prompt=prompt, deadline=deadline, choices=options.n, priority=options.priority,
            cache_salt=options.cache_salt, sampling=sampling,
            grammar=self._grammar(options, prompt), prompt_logprobs=options.scores,
            stop=StopParams(max_tokens=max_tokens, min_tokens=options.min_tokens,
                            stop_token_ids=eos | frozenset(options.stop_token_ids)))
        limits = self.config.router
        return Generation(request, self.workers, self.routing, self.metrics, Times(arrived=arrived),
                          partial(next, self._numbers), Bounds(
                              unread_bytes=limits.unread_bytes, max_resumes=limits.max_resumes,
                              resume_wait_seconds=limits.resume_wait_seconds))

    def _check_scores(self, options: Options, prompt: Prompt) -> None:
        """Raise InvalidRequestError for more logprobs of a prompt than one answer may hold."""
        if options.scores is None:
            return
        tokens, each, limit = len(prompt.tokens), 1 + options.scores, self.config.router.max_prompt_logprobs
        times = options.n if prompt.field == "prompt" else 1  # a chat's answer has them once
        if tokens * each * times > limit:
            raise InvalidRequestError(
                f"{tokens} prompt tokens, each with {each} logprobs, {times} times are more than the {limit} that an answer "
                "may hold (router.max_prompt_logprobs); shorten the prompt or ask for fewer",
                field="echo" if options.prompt_logprobs is None else "prompt_logprobs")

    def _grammar(self, options: Options, prompt: Prompt) -> Grammar | None:
        if options.grammar is None:
            return None
        begin, end = (self.builder.tokenizer.token_id(mark) if prompt.may_think else None
                      for mark in (reasoning.OPEN, reasoning.CLOSE))
        if end is None:
            return Grammar(text=options.grammar)
        opened = prompt.opens_thinking
        return Grammar(text=options.grammar, think_start=None if opened else begin, think_end=end, thinks=opened)

    def _limits_changed(self) -> None:
        admission = self.limits.admission
        self.metrics.in_flight.set(admission.held)
        self.metrics.waiting.set(admission.waiting)
        if admission.held:
            self._idle.clear()
        else:
            self._idle.set()

    def _account(self, generation: Generation) -> None:
        metrics, times = self.metrics, generation.times
        end = generation.end
        code = "ok" if end is None or end.error is None else end.error.code
        logger.info("the request ended: %s", code, extra={
            "request_id": generation.request.id, "prompt_tokens": len(generation.request.prompt.tokens),
            "output_tokens": generation.output_tokens, "resumes": generation.dispatch.resumes,
            "seconds": round(time.monotonic() - times.arrived, 4)})
        if self._recorder is not None:
            self._recorder.write(record(generation))
        if end is not None and end.error is None and times.ended is not None:
            metrics.e2e.observe(times.ended - times.arrived)
        if end is not None and end.error is not None:
            metrics.errors.labels(end.error.code).inc()
        prefill, decode = (generation.dispatch.stats.get(role) for role in Role)
        if computed := prefill or decode:
            metrics.cached_tokens.inc(computed.cached_tokens)
        if decode and decode.transfer_seconds:
            metrics.transfer.observe(decode.transfer_seconds)
            metrics.transfer_bytes.labels("kv").inc(decode.kv_bytes)
            metrics.transfer_bytes.labels("state").inc(decode.state_bytes)

    def _workers_changed(self) -> None:
        for role in Role:
            self.metrics.replicas.labels(role.value).set(self.workers.count(role))
        before, self._missing = self._missing, self.routing.missing(self.workers.views())
        if self._missing != before and self._missing.startswith(policy.MISFIT):
            logger.warning(self._missing)

    def status(self) -> dict[str, Any]:
        """What `slipstream status` shows."""
        return {"model": self.model_name, "problem": self.problem(), "grpc": self.grpc_address,
                "in_flight": self.limits.in_flight, "waiting": self.limits.admission.waiting,
                "max_in_flight": self.config.router.max_in_flight,
                "supervisor": self.workers.directory,
                "replicas": [describe(link) for link in self.workers.links()] + self._restarting()}

    async def details(self, detail: str) -> dict[str, Any]:
        """`status`, with the insides of every connected worker; `detail`: which, of `router.inspect.DETAILS`."""
        links = self.workers.links()
        told = await asyncio.gather(*(inspect(link, detail) for link in links))
        rows = [describe(link) | more for link, more in zip(links, told, strict=True)]
        return {**self.status(), "replicas": rows + self._restarting()}

    def _restarting(self) -> list[dict[str, Any]]:
        return [{"replica_id": one.replica_id, "role": convert.role_from_pb(one.role).value, "state": "restarting",
                 "epoch": one.epoch, "problem": one.problem} for one in self.workers.restarting]


def new_request_id() -> str:
    """Unique in every process."""
    return f"req-{uuid.uuid4().hex}"


def request_names(given: str) -> tuple[str, str]:
    """(ours, what the client is told): ours is unique, and begins with the client's own id if `given` is a sound one."""
    unique = new_request_id()
    return (f"{given}-{unique}", given) if _CLIENT_ID.fullmatch(given) else (unique, unique)
