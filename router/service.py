"""What a router is: prompts in, generations out, counted and limited. The HTTP app is its only user; knows no HTTP itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from router import policy
from router.actions import LegStats
from router.generate import Bounds, GenerateRequest, Generation, Times
from router.inspect import inspect
from router.limits import Limits
from router.link import WorkerLink
from router.openai import ChatRequest, CompletionRequest, Options
from router.prompt import PictureBytes, Prompt, PromptBuilder, Share
from router.record import record
from router.routing import Routing
from router.stream import TextStream
from router.workers import Workers
from slipstream import checkpoint as checkpoints
from slipstream.config import Config, hub_cache
from slipstream.errors import DeadlineError, InvalidRequestError, ModelNotFoundError, UnavailableError
from slipstream.observability.metrics import RouterMetrics
from slipstream.observability.record import Recorder
from slipstream.rpc import convert
from slipstream.rpc.security import OPEN, Security
from slipstream.types import Role, StopParams

logger = logging.getLogger(__name__)

PROMPT_THREADS = 2
LAST_WORDS_SECONDS = 1.0
"""For the errors of requests that a stop cuts off to reach their clients."""
_SEED_BITS = 63


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
        self.limits = Limits(config.router.max_in_flight)
        self._pictures = PictureBytes(config.router.max_pictures_bytes)
        self._recorder = (Recorder(Path(config.debug.record_dir), "router", config.debug.record_bytes)
                          if config.debug.record_dir else None)
        self.draining = False
        self._missing = ""  # when a worker last came or went
        self.created = int(time.time())
        self._threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="prompt")
        self._thread_free = asyncio.Semaphore(PROMPT_THREADS)
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[Generation] = set()
        self.routing = Routing(config.router, self.checkpoint, self.metrics)
        self.workers = Workers(self.model_name, self._workers_changed, config.router.worker_silence_seconds, security,
                               self.routing.index)

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

    async def begin_chat(self, request: ChatRequest, name: str, deadline: float) -> Ticket:
        """Raises the SlipstreamError that refuses the request."""
        return await self._begin(request.options, lambda take: self.builder.chat(request.messages, take), name, deadline)

    async def begin_completion(self, request: CompletionRequest, name: str, deadline: float) -> Ticket:
        """Raises the SlipstreamError that refuses the request."""
        prompt = request.prompt
        return await self._begin(
            request.options, lambda take: self.builder.text(prompt) if isinstance(prompt, str) else self.builder.ids(prompt),
            name, deadline)

    def end(self, ticket: Ticket) -> None:
        """The reader is done with it, however it ended. Call exactly once."""
        ticket.generation.close()
        ticket.share.close()
        self._running.discard(ticket.generation)
        self._leave()
        self._account(ticket.generation)

    async def _begin(self, options: Options, build: Callable[[Callable[[int], None]], Prompt], name: str,
                     deadline: float) -> Ticket:
        arrived = time.monotonic()
        if options.model != self.model_name:
            raise ModelNotFoundError(f"the model that was asked for is not served here; this router serves {self.model_name}",
                                     field="model")
        if reason := self.problem():
            raise policy.refusal(reason)
        self.limits.admit()
        self._idle.clear()
        self.metrics.in_flight.set(self.limits.in_flight)
        generation: Generation | None = None
        share = Share(self._pictures)
        try:
            async with asyncio.timeout(max(0.0, deadline - arrived)):
                prompt = await self._build(partial(build, share.take))
            generation = self._generation(options, prompt, name, arrived, deadline)
            self._running.add(generation)
            generation.start()
        except BaseException as error:
            share.close()
            if generation is not None:
                self._running.discard(generation)
                generation.close()
            if isinstance(error, TimeoutError):
                raise DeadlineError("the request's deadline passed while its prompt was prepared") from error
            raise
        finally:
            if generation not in self._running:
                self._leave()
        self.metrics.prompt_tokens.inc(len(prompt.tokens))
        hidden = generation.request.stop.stop_token_ids
        texts = tuple(TextStream(self.builder.tokenizer, options.stop, hidden, options.min_tokens) for _ in range(options.n))
        return Ticket(id=name, options=options, generation=generation, prompt_tokens=len(prompt.tokens), texts=texts,
                      share=share)

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
        max_tokens = self.builder.max_tokens(prompt, options.max_tokens, self._context(options, prompt))
        if options.min_tokens > max_tokens:
            raise InvalidRequestError(f"min_tokens is {options.min_tokens}; there is room for {max_tokens} tokens",
                                      field="min_tokens")
        request = GenerateRequest(
            id=name, prompt=prompt, deadline=deadline, choices=options.n, priority=options.priority,
            cache_salt=options.cache_salt, sampling=sampling,
            stop=StopParams(max_tokens=max_tokens, min_tokens=options.min_tokens,
                            stop_token_ids=eos | frozenset(options.stop_token_ids)))
        limits = self.config.router
        return Generation(request, self.workers, self.routing, self.metrics, Times(arrived=arrived),
                          partial(next, self._numbers), Bounds(
                              unread_bytes=limits.unread_bytes, max_resumes=limits.max_resumes,
                              resume_wait_seconds=limits.resume_wait_seconds))

    def _leave(self) -> None:
        self.limits.leave()
        self.metrics.in_flight.set(self.limits.in_flight)
        if not self.limits.in_flight:
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
        return {"model": self.model_name, "problem": self.problem(), "in_flight": self.limits.in_flight,
                "max_in_flight": self.limits.max_in_flight, "supervisor": self.workers.directory,
                "replicas": [_describe(link) for link in self.workers.links()] + self._restarting()}

    async def details(self, detail: str) -> dict[str, Any]:
        """`status`, with the insides of every connected worker; `detail`: which, of `router.inspect.DETAILS`."""
        links = self.workers.links()
        told = await asyncio.gather(*(inspect(link, detail) for link in links))
        rows = [_describe(link) | more for link, more in zip(links, told, strict=True)]
        return {**self.status(), "replicas": rows + self._restarting()}

    def _restarting(self) -> list[dict[str, Any]]:
        return [{"replica_id": one.replica_id, "role": convert.role_from_pb(one.role).value, "state": "restarting",
                 "epoch": one.epoch, "problem": one.problem} for one in self.workers.restarting]


def report(generation: Generation) -> dict[str, float | int]:
    """The router's account of one request, for a client that asked for it."""
    times, stats = generation.times, generation.dispatch.stats
    prefill, decode = stats.get(Role.PREFILL), stats.get(Role.DECODE)
    first = times.first_token
    return {
        "kv_bytes": decode.kv_bytes if decode else 0, "state_bytes": decode.state_bytes if decode else 0,
        "transfer_seconds": decode.transfer_seconds if decode else 0.0,
        "queue_seconds": prefill.queue_seconds if prefill else decode.queue_seconds if decode else 0.0,
        "prefill_seconds": prefill.compute_seconds if prefill else 0.0,
        "decode_seconds": decode.compute_seconds if decode else 0.0,
        "ttft_seconds": first - times.arrived if first is not None else 0.0,
        "cached_tokens": (prefill or decode or LegStats()).cached_tokens, "resumes": generation.dispatch.resumes,
    }


def new_request_id() -> str:
    """Unique in every process."""
    return f"req-{uuid.uuid4().hex}"


def _describe(link: WorkerLink) -> dict[str, Any]:
    info, load, view = link.info, link.load, link.view()
    if info is None or view is None:
        row: dict[str, Any] = {"replica_id": "", "role": "?", "state": "disconnected", "address": link.address,
                               "problem": link.problem}
        if last := link.last_info:
            row |= {"replica_id": last.replica_id, "role": convert.role_from_pb(last.role).value, "epoch": last.epoch}
        return row
    return {
        "replica_id": info.replica_id, "role": view.role.value, "state": "draining" if link.draining else "ready",
        "address": link.address, "epoch": info.epoch, "pid": info.pid, "model": info.model_name, "dtype": info.dtype,
        "device": info.device, "version": info.version, "compatibility_hash": info.compatibility_hash,
        "channels": list(info.channels),
        "metrics_address": info.metrics_address, "total_blocks": info.total_blocks, "total_state_slots": info.total_state_slots,
        "load": {"waiting": load.waiting, "running": load.running, "parked": load.parked, "free_blocks": load.free_blocks,
                 "free_state_slots": load.free_state_slots}}
