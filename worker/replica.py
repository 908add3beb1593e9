"""One engine with its thread and both halves of the cache-store channel. Knows no role: either can be mounted on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

import slipstream
from cache_transfer.layout import CacheLayout
from cache_transfer.load import CacheLoader
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import open_paths
from cache_transfer.store import CacheStore
from slipstream.checkpoint import Checkpoint
from slipstream.config import Config
from slipstream.engine import build
from slipstream.engine.caches import states_of
from slipstream.engine.engine import Engine, StepResult
from slipstream.engine.loop import EngineLoop
from slipstream.engine.prefix_cache import CacheChanges
from slipstream.engine.sequence import GenerationRequest, Matcher, Timing
from slipstream.errors import SlipstreamError, UnavailableError
from slipstream.layers.batch import AttentionCache, LayerCache
from slipstream.layers.parallel import Communicator
from slipstream.rpc.security import Security
from slipstream.sharding import Geometry, Shard
from slipstream.text.grammar import Grammars
from slipstream.types import EngineLoad, RequestId, Role, TokenEvent
from worker import ranks
from worker.gang import GangLog
from worker.jobs import PromptDone
from worker.ranks import Place
from worker.revision import weights_revision

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepNews:
    """What one engine step did, with everything that only the engine thread can look up."""

    tokens: tuple[tuple[tuple[TokenEvent, ...], Timing | None, PromptDone | None], ...]
    """By request. Timing: with the request's last tokens here; PromptDone: with the first ones of a prompt of this replica."""
    failures: tuple[tuple[RequestId, SlipstreamError], ...]
    load: EngineLoad
    cache: CacheChanges | None = None
    """What became of the prefix cache since the last news."""


class Replica:
    """What does not depend on a role. Create it before the event loop runs: it loads the weights."""

    def __init__(self, config: Config, role: Role, place: Place | None = None) -> None:
        """`role` limits parked memory and state snapshots, and says whether peers write here. `place`: rank 0's, if there are
        several ranks; waits for them. Raises ConfigError, CheckpointError and GangError."""
        self._role = role
        self.config = config
        self.checkpoint: Checkpoint = build.checkpoint_of(config)
        self.model_name = config.model.name
        self.device = build.device_of(config.model)
        self.dtype = build.dtype_name(config.model, self.checkpoint, self.device)
        parked = config.transfer.parked_fraction if role is Role.PREFILL else 1.0
        self.layout = cache_layout(config, self.checkpoint, self.model_name, self.dtype)
        self.gang: GangLog | None = None
        comm: Communicator | None = None
        if place is not None:
            self.gang, comm = ranks.lead(place, fingerprint(role, self.layout, config), self.device)
        self._engine: Engine = build.build(self.checkpoint, config.model, config.engine, parked_fraction=parked, comm=comm,
                                           log=self.gang, state_snapshots=snapshots(role, config),
                                           draft_tokens=draft_tokens(role, config))
        self.max_context = self._engine.max_context
        self.capacity: EngineLoad = self._engine.load()
        """Of the empty engine: its totals."""
        shard = comm.shard if comm is not None else None
        self.geometry = shard.geometry if shard is not None else Geometry(stages=(len(self.checkpoint.layers),))
        self._memory = CacheMemory(self.layout, cache_tensors(self.checkpoint, self._engine.caches, shard), shard)
        self._loop: EngineLoop | None = None
        self._grammars = Grammars(self.checkpoint.path, self.checkpoint.vocab_size, self.checkpoint.eos_token_ids)

    async def matcher(self, request: GenerationRequest) -> Matcher | None:
        """Of the request's grammar, after its output so far; None: it has none. Raises InvalidRequestError."""
        grammar = request.grammar
        if grammar is None:
            return None
        found = await asyncio.to_thread(self._grammars.matcher, grammar)
        for token in request.output:
            found.accept(token)
        return found

    def channel_ends(self, *, replica_id: str, epoch: int, host: str, security: Security) -> tuple[CacheStore, CacheLoader]:
        """Rank 0's source and destination side of the cache-store channel; made on the event loop. Raises ConfigError."""
        return channel_ends(self._role, self._memory, self.config, replica_id=replica_id, epoch=epoch, host=host,
                            security=security)

    def start(self, on_step: Callable[[StepNews], None], on_death: Callable[[BaseException], None]) -> None:
        """Start the engine thread. Both functions are called on the event loop that runs now."""
        loop = asyncio.get_running_loop()

        def stepped(result: StepResult) -> None:
            loop.call_soon_threadsafe(on_step, self._news(result))

        def died(error: BaseException) -> None:
            loop.call_soon_threadsafe(on_death, error)

        self._loop = EngineLoop(self._engine, stepped, died)
        self._loop.start()

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """Run `fn` on the engine thread between two steps. Calls run in the order they were made.

        A cancelled caller's function may still run; what it took has to be given back by a later call.
        """
        assert self._loop is not None, "the replica was started"
        return await asyncio.wrap_future(self._loop.call(fn))

    def tell(self, fn: Callable[[Engine], None]) -> None:
        """Like `call`, for what has no result; a failure is logged."""
        assert self._loop is not None, "the replica was started"
        self._loop.call(fn).add_done_callback(_log_failure)

    def stop(self) -> None:
        """End the engine thread after its running step."""
        if self._loop is not None:
            self._loop.stop(timeout=30.0)

    def _news(self, result: StepResult) -> StepNews:
        """On the engine thread."""
        engine = self._engine
        by_request: dict[RequestId, list[TokenEvent]] = {}
        for event in result.events:
            by_request.setdefault(event.request, []).append(event)
        tokens = tuple((tuple(events), result.timings.get(id), _prompt_done(engine, id) if id in result.handed_off else None)
                       for id, events in by_request.items())
        return StepNews(tokens=tokens, failures=result.failures, load=engine.load(), cache=engine.cache_changes())


def _prompt_done(engine: Engine, id: RequestId) -> PromptDone:
    return PromptDone(mrope=engine.mrope(id), cached_tokens=engine.cached_tokens(id))


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None and not isinstance(error, UnavailableError):
        logger.error("the engine could not be told: %s", error, exc_info=error)


def cache_layout(config: Config, checkpoint: Checkpoint, model_name: str, dtype: str) -> CacheLayout:
    """What a peer's cache must look like for this replica's bytes to mean the same there."""
    kv_dtype, kv_scales = build.kv_cache(checkpoint, config.engine, dtype)
    return CacheLayout(model_name=model_name, weights_revision=weights_revision(checkpoint.path), layers=checkpoint.layers,
                       block_size=config.engine.block_size, kv_dtype=kv_dtype, conv_dtype=dtype,
                       recurrent_dtype=config.engine.state_dtype, kv_scales=kv_scales)


def cache_tensors(checkpoint: Checkpoint, caches: Sequence[LayerCache], shard: Shard | None) -> dict[str, torch.Tensor]:
    """A rank's caches by the layout's tensor names; `shard` None: the only rank's."""
    tensors: dict[str, torch.Tensor] = {}
    layers = checkpoint.layers if shard is None else shard.specs(checkpoint.layers)
    for layer, cache in zip(layers, caches, strict=True):
        if isinstance(cache, AttentionCache):
            tensors[f"{layer.name}.kv"] = cache.kv
        tensors |= {f"{layer.name}.{name}": state for name, state in states_of(cache).items()}
    return tensors


def channel_ends(role: Role, memory: CacheMemory, config: Config, *, replica_id: str, epoch: int, host: str,
                 security: Security) -> tuple[CacheStore, CacheLoader]:
    """A rank's source and destination side."""
    rank, transfer = memory.shard.rank, config.transfer
    paths = open_paths(transfer, memory.extent, process=f"{replica_id}.{rank}", host=host,
                       lands=role is Role.DECODE or config.router.routing.load_tokens > 0)
    return (CacheStore(memory, paths, replica_id=replica_id, epoch=epoch, rank=rank, config=transfer),
            CacheLoader(memory, paths, replica_id=replica_id, epoch=epoch, rank=rank, config=transfer, security=security))


def fingerprint(role: Role, layout: CacheLayout, config: Config) -> str:
    """What all ranks of a replica must have in common."""
    return (f"{slipstream.__version__} {role.value} {layout.hash} {config.engine} {config.speculative} "
            f"{snapshots(role, config)}")


def draft_tokens(role: Role, config: Config) -> int:
    """Drafts of a sequence and step: prefill runs the layer that drafts for its state alone, which decode goes on from."""
    return 0 if role is Role.PREFILL else config.speculative.tokens


def snapshots(role: Role, config: Config) -> int | None:
    """State snapshots that the prefix cache keeps; None: as configured. Decode gets every state sent: it needs them only where
    prefill loads the next turn from it, or where it computes prompts itself."""
    wanted = config.router.routing
    return None if role is Role.PREFILL or wanted.load_tokens or wanted.local_prefill_tokens else 0
