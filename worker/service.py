"""The gRPC Worker service and the health service of one replica; what a request does is its role's business."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry

import slipstream
from cache_transfer.transfers import Transfers
from slipstream.engine.engine import Engine
from slipstream.engine.prefix_cache import CacheChanges
from slipstream.errors import InternalError, InvalidRequestError, SlipstreamError
from slipstream.observability.worker_metrics import WorkerMetrics
from slipstream.rpc import convert
from slipstream.rpc.server import messages
from slipstream.types import EngineCounters, EngineLoad, Role
from slipstream.v1 import worker_pb2 as pb
from slipstream.v1 import worker_pb2_grpc
from worker.feed import CacheFeed
from worker.jobs import Jobs, RoleWorker
from worker.metrics import LegMetrics
from worker.replica import Replica, StepNews
from worker.session import Session
from worker.transfers import RankTransfers

logger = logging.getLogger(__name__)

LOAD_SECONDS = 1.0
STUCK_SECONDS = 120.0
"""No step takes so long: an engine that does not answer for this time hangs, on a device or another rank, and will not end."""
SPEED_TOKENS = 64
"""Through the model, from one measurement of its speed to the next, at least."""
SERVICE = "slipstream.worker.v1.Worker"

WriteContext = grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]
PutImage = Callable[[AsyncIterator[pb.ImageChunk]], Awaitable[bool]]
"""Takes a picture's chunks; True if it was there already. Raises SlipstreamError."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who this replica is to others."""

    replica_id: str
    epoch: int
    role: Role


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves any number of routers. `put_image` None: this role takes no pictures."""

    def __init__(self, identity: Identity, replica: Replica, worker: RoleWorker, put_image: PutImage | None = None) -> None:
        self.address = ""
        """Where peers and routers reach this process; set once it listens."""
        self.other_addresses: list[str] = []
        """Where the CacheStores of the replica's other ranks listen, by rank."""
        self.channels: list[str] = []
        """Of the CacheStore; set before it listens."""
        self.host = ""
        """Names the machine; set before it listens."""
        self.transfers = RankTransfers(Transfers())
        """Of rank 0; set before it listens."""
        self.metrics_address = ""
        """Where `GET /metrics` is answered; empty: nowhere."""
        self.dead = asyncio.Event()
        """The engine thread has ended by a fault: the process is of no use any more."""
        self._identity = identity
        self._replica = replica
        self._load: EngineLoad = replica.capacity
        self.metrics = WorkerMetrics(CollectorRegistry(), identity.role, lambda: self._load)
        self._jobs = Jobs(worker, LegMetrics(self.metrics))
        self._put_image = put_image
        self._health = health.aio.HealthServicer()
        self._sessions: set[Session] = set()
        self._proved = 0  # jobs so far when the ledgers were last proved
        self._feed = CacheFeed()
        self._counted = EngineCounters()  # when the speed was last measured
        self._speed = 0.0
        self._asked: asyncio.Future[None] | None = None
        self._asked_at = 0.0
        self._pulse: asyncio.Task[None] | None = None

    # Life ----------------------------------------------------------------------------------------------------------------

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register both services."""
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(self) -> None:
        """Start the engine thread and say SERVING."""
        fields = self._fixed_fields()
        self.metrics.describe(fields)
        logger.info("serving: %s", ", ".join(f"{name} {value}" for name, value in fields.items()))
        self._replica.start(self._on_step, self._on_death)
        self._pulse = asyncio.create_task(self._beat())
        await self._set_health(serving=True)

    async def drain(self, timeout_seconds: float) -> int:
        """Stop admitting, wait for the running requests; how many were cut off by the time-out."""
        await self._set_health(serving=False)
        waiting = asyncio.create_task(self._jobs.drain(timeout_seconds))
        await asyncio.sleep(0)  # the flag is set now
        for session in self._sessions:
            session.want_load()
        return await waiting

    def end_sessions(self) -> None:
        """Let routers go: their streams end when everything has been said."""
        for session in self._sessions:
            session.end()

    async def stop(self) -> None:
        """End the engine thread. The server has been stopped, so no session is left."""
        if self._pulse is not None:
            self._pulse.cancel()
        await asyncio.to_thread(self._replica.stop)

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    # The engine's news, on the event loop ----------------------------------------------------------------------------------

    def _on_step(self, news: StepNews) -> None:
        self._load = news.load
        self._cached(news.cache)
        self._jobs.on_step(news.tokens, news.failures)

    def _on_death(self, error: BaseException) -> None:
        logger.critical("the engine has ended; this process will end too: %r", error)
        self._jobs.draining = True
        self._jobs.abandon_all(lambda: InternalError("the engine of this replica ended by a fault; send the request again"))
        self.dead.set()

    async def _beat(self) -> None:
        """Once a second: tell the load; and when all requests have gone, prove the ledgers."""
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            try:
                if not len(self._jobs) and self._proved != self._jobs.started:
                    await self._prove()
                else:
                    await self._look()
            except SlipstreamError as error:
                logger.error("the engine does not answer: %s", error)
                return
            for session in self._sessions:
                session.want_load()

    async def _look(self) -> None:
        """Ask the engine for its load. In the middle of a long step the last answer goes out again: it is our sign of life."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._replica.call(self._teller()))
            self._asked_at = asyncio.get_running_loop().time()
        await asyncio.wait({self._asked}, timeout=LOAD_SECONDS)
        if self._asked.done():
            asked, self._asked = self._asked, None
            asked.result()
        elif asyncio.get_running_loop().time() - self._asked_at > STUCK_SECONDS and not self.dead.is_set():
            self._on_death(TimeoutError(f"a step has not ended for {STUCK_SECONDS:.0f} s"))

    async def _prove(self) -> None:
        """Nothing may be owned while no request runs. A leak is a bug of ours, so it is loud and stops new traffic."""
        tell = self._teller()

        def proof(engine: Engine) -> None:
            engine.check_integrity()
            tell(engine)

        started = self._jobs.started
        try:
            await self._replica.call(proof)
            if self._jobs.started != started:
                return  # a request came meanwhile: it may own what it likes
            self._proved = started
            if replace(self._load, cached_blocks=0) != self._replica.capacity:
                raise InternalError(f"no request runs, but not all memory is free: {self._load}")
        except InternalError as error:
            logger.critical("the ledgers of this replica are wrong: %s", error)
            await self._set_health(serving=False)

    def _teller(self) -> Callable[[Engine], None]:
        """For the engine thread: tells what the engine is like, in order with its steps and with what it told before. An answer
        that waits for somebody to take it could be overtaken by newer ones."""
        loop = asyncio.get_running_loop()

        def tell(engine: Engine) -> None:
            loop.call_soon_threadsafe(self._heard, engine.load(), engine.counters(), engine.cache_changes())

        return tell

    def _heard(self, load: EngineLoad, counters: EngineCounters, cache: CacheChanges | None) -> None:
        self._load = load
        self._cached(cache)
        self.metrics.engine_did(counters)
        seconds, tokens = counters.step_seconds - self._counted.step_seconds, counters.step_tokens - self._counted.step_tokens
        if tokens >= SPEED_TOKENS and seconds > 0:
            self._counted = counters  # some steps are half empty: the best of late says what it can
            self._speed = max(tokens / seconds, 0.9 * self._speed + 0.1 * tokens / seconds)

    def _cached(self, cache: CacheChanges | None) -> None:
        if cache is not None:
            self._feed.apply(cache.levels, whole=cache.whole)

    def _load_message(self) -> pb.Load:
        return convert.load_to_pb(self._load, draining=self._jobs.draining, tokens_per_second=self._speed)

    # RPCs ------------------------------------------------------------------------------------------------------------------

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:  # noqa: N802 (gRPC's name)
        """What this replica is."""
        replica, identity = self._replica, self._identity
        kv_bytes, state_bytes = replica.layout.bytes_necessary(1)
        return pb.WorkerInfo(
            replica_id=identity.replica_id, epoch=identity.epoch, role=convert.role_to_pb(identity.role),
            model_name=replica.model_name, compatibility_hash=replica.layout.hash,
            cache_store_addresses=[self.address, *self.other_addresses],
            block_size=replica.config.engine.block_size, total_blocks=replica.capacity.total_blocks,
            total_state_slots=replica.capacity.total_state_slots, max_context=replica.max_context,
            max_running=replica.config.engine.max_running, draining=self._jobs.draining, pid=os.getpid(),
            version=slipstream.__version__, device=str(replica.device), dtype=replica.dtype,
            tensor_parallel=replica.geometry.tp, pipeline_parallel=replica.geometry.pp, metrics_address=self.metrics_address,
            channels=self.channels, host=self.host, kv_bytes_per_token=kv_bytes, state_bytes=state_bytes,
            computes_prompts=identity.role is Role.DECODE)

    def _fixed_fields(self) -> dict[str, str]:
        """What does not change, for the log and the metrics. A prefix is found again in whole blocks only, and a prompt of a
        model with states can go on only from a snapshot of them; decode gets states sent."""
        replica, config = self._replica, self._replica.config.engine
        stateful = self._identity.role is Role.PREFILL and replica.checkpoint.has_linear_layers
        found = config.prefix_cache and (config.state_snapshots > 0 or not stateful)
        return {"replica_id": self._identity.replica_id, "model": replica.model_name, "device": str(replica.device),
                "dtype": replica.dtype, "version": slipstream.__version__, "block_size": str(config.block_size),
                "min_cacheable_prefix": str(config.block_size if found else 0), "max_context": str(replica.max_context)}

    async def Session(self, request_iterator: AsyncIterator[pb.RouterMessage],  # type: ignore[override]  # noqa: N802
                      context: WriteContext) -> None:
        """One router's requests; they live as long as the stream. It writes: a generator could hear too late of its end."""
        session = Session(self._identity.role, self._jobs, self._load_message, self._feed)
        self._sessions.add(session)
        session.want_load()
        reader = asyncio.create_task(_read(session, request_iterator))
        writer = asyncio.create_task(_write(session, context))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the stream is gone; otherwise a write that has begun must end before the stream can
            writer.cancel()
            raise
        finally:
            self._sessions.discard(session)
            session.close()
            session.end()
            reader.cancel()
            fault, _ = await asyncio.gather(reader, writer, return_exceptions=True)
        if isinstance(fault, InvalidRequestError):
            logger.warning("a router's session ends: %s", fault)
            await _abort(context, fault)

    async def PutImage(self, request_iterator: AsyncIterator[pb.ImageChunk], context: Any  # noqa: N802 (gRPC's name)
                       ) -> pb.PutImageReply:
        """Take a picture for requests to come."""
        try:
            if self._put_image is None:
                raise InvalidRequestError(f"{self._identity.replica_id} takes no images: it decodes, or its model is text-only",
                                          field="images")
            return pb.PutImageReply(already_present=await self._put_image(messages(request_iterator)))
        except SlipstreamError as error:
            return await _abort(context, error)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: N802 (gRPC's name)
        """Stop admitting and wait; the process goes on until it is told to stop."""
        return pb.DrainReply(unfinished=await self.drain(request.timeout_ms / 1000))

    async def Inspect(self, request: pb.InspectRequest, context: Any) -> pb.InspectReply:  # noqa: N802 (gRPC's name)
        """What moves, of all ranks; and the kernel table and the ledgers, between two engine steps."""
        try:
            return await self._insides(only_transfers=request.only_transfers)
        except SlipstreamError as error:
            return await _abort(context, error)

    async def _insides(self, *, only_transfers: bool = False) -> pb.InspectReply:
        reply = await self.transfers.of_all(self.other_addresses)
        if not only_transfers:
            reply.MergeFrom(await self._replica.call(_inspect))
        return reply

    async def log_insides(self, asked: asyncio.Event) -> None:
        """Whenever it is `asked`, write what `Inspect` tells to the log: that needs neither a router nor a client."""
        while True:
            await asked.wait()
            asked.clear()
            try:
                insides = await self._insides()
            except SlipstreamError as error:
                logger.warning("nothing can be said of kernels and memory: %s", error)
            else:
                logger.info("kernels, memory and transfers", extra=MessageToDict(insides, preserving_proto_field_name=True))


def _inspect(engine: Engine) -> pb.InspectReply:
    reply = pb.InspectReply()
    for row in engine.kernels:
        reply.kernels.add(op=row.op, implementation=row.implementation, reason=row.reason)
    for owner, (blocks, slots) in engine.holdings().items():
        kind, request = ("free", None) if owner is None else (owner.kind.value, owner.request)
        reply.holdings.add(owner=kind, request_id=str(request or ""), blocks=blocks, state_slots=slots)
    return reply


async def _abort(context: Any, error: SlipstreamError) -> NoReturn:
    await context.abort(grpc.StatusCode[error.grpc_status], error.message)
    raise error


async def _read(session: Session, requests: AsyncIterator[pb.RouterMessage]) -> None:
    async for message in messages(requests):
        session.receive(message)
        await session.room()


async def _write(session: Session, context: WriteContext) -> None:
    while (message := await session.next_message()) is not None:
        await context.write(message)
