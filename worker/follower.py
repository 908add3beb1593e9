"""Every rank of a replica but rank 0: carries out the log, serves and loads its part of prompts that travel. Decides nothing.

One thread reads the log. What concerns transfers happens on the event loop, and the thread waits for it: so the order of the
log holds between what steps write and what transfers read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from cache_transfer.load import CacheLoader, Loaded, given
from cache_transfer.memory import CacheMemory
from cache_transfer.regions import Landing
from cache_transfer.source import SourceTransfer
from cache_transfer.store import CacheStore
from slipstream.config import Config
from slipstream.engine import build, gang
from slipstream.engine.executor import Published, RankExecutor
from slipstream.engine.log import CopyBlock, CopyState, End, Step
from slipstream.errors import GangError, InternalError, SlipstreamError, by_code
from slipstream.rpc.security import Security
from slipstream.types import RequestId, Role
from worker import ranks
from worker.entries import (
    Allocated,
    CancelLoad,
    Close,
    Down,
    EndLoad,
    Expect,
    Fail,
    Finish,
    Load,
    LoadEnded,
    Serving,
)
from worker.link import Follower
from worker.ranks import Place
from worker.replica import cache_layout, cache_tensors, channel_ends, draft_tokens, fingerprint, snapshots

logger = logging.getLogger(__name__)


class FollowingRank:
    """Runs until rank 0 ends it."""

    def __init__(self, link: Follower[Down], executor: RankExecutor, store: CacheStore, loader: CacheLoader) -> None:
        self._link = link
        self._executor = executor
        self._store = store
        self._loader = loader
        self._transfers: dict[str, SourceTransfer] = {}
        self._by_request: dict[RequestId, SourceTransfer] = {}
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._loaded: dict[int, Loaded] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self, address: str) -> None:
        """Say that this rank serves, then follow. Raises GangError when rank 0 is lost, and what a step raises."""
        self._link.say(Serving(address=address))
        threading.Thread(target=self._follow, name="log", daemon=True).start()
        await self._over

    def _follow(self) -> None:
        def over(error: BaseException | None) -> None:
            if not self._over.done():
                self._over.set_exception(error) if error is not None else self._over.set_result(None)

        ended: BaseException | None = None
        try:
            with torch.inference_mode():
                while not isinstance(entry := self._link.read(), End):
                    self._carry_out(entry)
        except BaseException as error:
            ended = error
        self._loop.call_soon_threadsafe(over, ended)

    def _carry_out(self, entry: Down) -> None:
        match entry:
            case Step() | CopyBlock() | CopyState():
                gang.follow(entry, self._executor, self._link.say, self._published)
            case Allocated():
                if transfer := self._transfers.get(entry.transfer_id):
                    transfer.allocated(entry.blocks, entry.state_slot, entry.cached_tokens)
            case _:
                done = threading.Event()
                failed: list[BaseException] = []

                def act() -> None:
                    try:
                        self._act(entry)
                    except BaseException as error:
                        failed.append(error)
                    done.set()

                self._loop.call_soon_threadsafe(act)
                done.wait()
                if failed:
                    raise failed[0]

    def _published(self, published: Published, layer: int) -> None:
        if transfer := self._by_request.get(published.request):
            transfer.layer_done(layer, published.tokens, published.last)

    # On the loop --------------------------------------------------------------------------------------------------------

    def _act(self, entry: Any) -> None:
        match entry:
            case Expect():
                transfer = self._store.expect(entry.transfer_id, entry.request, entry.num_tokens,
                                              _Ended(lambda: self._forget(entry)))
                self._transfers[entry.transfer_id] = self._by_request[entry.request] = transfer
                transfer.begin(0)  # rank 0's stream says what is cached
            case Finish() if held := self._transfers.get(entry.transfer_id):
                held.finish()
            case Close() if held := self._transfers.get(entry.transfer_id):
                held.close()
            case Fail() if held := self._transfers.get(entry.transfer_id):
                held.fail(by_code(entry.code, entry.message))
            case Load():
                self._loads[entry.number] = asyncio.create_task(self._load(entry))
            case CancelLoad() if task := self._loads.get(entry.number):
                task.cancel()
            case EndLoad() if loaded := self._loaded.pop(entry.number, None):
                closing = asyncio.create_task(loaded.close(committed=entry.committed))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def _forget(self, entry: Expect) -> None:
        self._transfers.pop(entry.transfer_id, None)
        self._by_request.pop(entry.request, None)

    async def _load(self, entry: Load) -> None:
        error: SlipstreamError | None = None
        loaded: Loaded | None = None
        landing = Landing(blocks=entry.blocks, state_slot=entry.state_slot, have_tokens=entry.have_tokens)
        try:
            loaded = await self._loader.load(
                entry.addresses, transfer_id=entry.transfer_id, attempt=entry.attempt, source_epoch=entry.source_epoch,
                request_id=entry.request_id, remaining_seconds=entry.remaining_seconds, admit=given(landing, entry.num_tokens))
        except SlipstreamError as failure:
            error = failure
        except asyncio.CancelledError:
            error = GangError("rank 0 gave the load up")
        except Exception as failure:
            logger.exception("loading a prompt failed", extra={"request_id": entry.request_id})
            error = InternalError(f"loading a prompt failed: {failure!r}")
        del self._loads[entry.number]
        if error is not None or loaded is None:
            error = error or InternalError("a load without an end")
            self._link.say(LoadEnded(number=entry.number, code=error.code, message=error.message))
            return
        self._loaded[entry.number] = loaded
        self._link.say(LoadEnded(number=entry.number, kv_bytes=loaded.kv_bytes, state_bytes=loaded.state_bytes,
                                 seconds=loaded.seconds))


class FollowingReplica:
    """What a process has that is another rank than rank 0. Create it before the event loop runs: it loads the weights."""

    def __init__(self, config: Config, role: Role, place: Place) -> None:
        """Raises ConfigError, CheckpointError and GangError."""
        self._config, self._role = config, role
        checkpoint = build.checkpoint_of(config)
        device = build.device_of(config.model)
        layout = cache_layout(config, checkpoint, config.model.name, build.dtype_name(config.model, checkpoint, device))
        self._link, comm = ranks.follow(place, fingerprint(role, layout, config), device)
        self._executor, caches = build.build_rank(checkpoint, config.model, config.engine, comm,
                                                  state_snapshots=snapshots(role, config),
                                                  draft_tokens=draft_tokens(role, config))
        self._memory = CacheMemory(layout, cache_tensors(checkpoint, caches, place.shard), place.shard)

    def channel_ends(self, *, replica_id: str, epoch: int, host: str, security: Security) -> tuple[CacheStore, CacheLoader]:
        """Its source and destination side of the cache-store channel; made on the event loop. Raises ConfigError."""
        return channel_ends(self._role, self._memory, self._config, replica_id=replica_id, epoch=epoch, host=host,
                            security=security)

    async def follow(self, store: CacheStore, loader: CacheLoader, address: str) -> None:
        """Until rank 0 ends it. Raises as FollowingRank.run does."""
        await FollowingRank(self._link, self._executor, store, loader).run(address)
        self._link.close()


class _Ended:
    """Implements TransferListener for a transfer that rank 0 decides on."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def ready(self) -> None:
        """Rank 0's says so."""

    def parked(self, reason: str) -> None:
        """Rank 0's is, too: the destination gives up as a whole."""

    def done(self, committed: bool) -> None:
        """All that read from this rank have said Done."""
        self._end()

    def failed(self, error: SlipstreamError) -> None:
        """By rank 0, or by itself, which its reader tells rank 0's."""
        self._end()
