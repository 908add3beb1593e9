"""A replica of several ranks, a thread each, over its real connections."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream import checkpoint as checkpoints
from slipstream import sharding
from slipstream.config import EngineConfig
from slipstream.engine import caches, gang, log
from slipstream.engine.engine import Engine
from slipstream.engine.executor import RankExecutor
from slipstream.errors import GangError
from slipstream.layers.parallel import Communicator
from slipstream.models import registry
from slipstream.models.qwen import CausalLM
from tests.support import ranks
from tests.support.engine_driver import poison
from worker.link import Follower, Hello, Leader

CONFIG = EngineConfig(kv_cache_tokens=16 * 60, max_running=8, max_batch_tokens=96, growth_tokens=8, state_snapshots=6)
Down = log.Step | log.CopyBlock | log.CopyState | log.Beat | log.End
Up = log.Tokens | log.Beat


class QueueLog:
    """Implements gang.Log over a Leader."""

    def __init__(self, leader: Leader[Any, Any]) -> None:
        self._leader = leader
        self._tokens: queue.Queue[log.Tokens | str] = queue.Queue()
        leader.start(lambda rank, entry: self._tokens.put(entry), self._tokens.put)

    def append(self, entry: log.Entry) -> None:
        self._leader.append(entry)

    def next_tokens(self) -> log.Tokens:
        found = self._tokens.get(timeout=30)
        if isinstance(found, str):
            raise GangError(found)
        return found


def replica(folder: Path, tp: int, pp: int, serve: Callable[[Engine], Any], drafts: int = 0,
            watch: Callable[[CausalLM], Any] = lambda model: model) -> Any:
    """What `serve` makes of rank 0's engine; the other ranks follow it. `watch`: puts a double around each rank's model."""
    checkpoint = checkpoints.read(folder, drafts=drafts > 0)
    geometry = sharding.plan(checkpoint, tp=tp, pp=pp)
    port: queue.Queue[int] = queue.Queue()

    def work(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        model = watch(registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"), comm=comm))
        with torch.inference_mode():
            return lead(comm, model) if comm.shard.rank == 0 else follow(comm, model)

    def lead(comm: Communicator, model: Any) -> Any:
        leader: Leader[Any, Any] = Leader("127.0.0.1", 0, world=geometry.world, epoch=1, fingerprint="same", up=Up)
        for _ in range(geometry.world - 1):
            port.put(leader.port)
        leader.gather(30, 0)
        engine = Engine(model, checkpoint, CONFIG, comm=comm, log=QueueLog(leader), draft_tokens=drafts)
        poison(engine)
        found = serve(engine)
        leader.close()
        return found

    def follow(comm: Communicator, model: Any) -> Any:
        hello = Hello(rank=comm.shard.rank, world=geometry.world, epoch=1, fingerprint="same")
        link: Follower[Any] = Follower("127.0.0.1", port.get(timeout=30), hello, down=Down, timeout_seconds=30)
        link.start(lambda reason: None)
        slots = CONFIG.max_running * (1 + drafts) + CONFIG.state_snapshots
        own = caches.allocate(comm.shard.specs(checkpoint.layers), CONFIG, slots, torch.float32, torch.device("cpu"))
        local = RankExecutor(model, own, CONFIG.block_size, torch.device("cpu"), comm,
                             checkpoint=checkpoint, dtype=torch.float32, draft_tokens=drafts)
        while not isinstance(entry := link.read(), log.End):
            gang.follow(entry, local, link.say, lambda published, layer: None)

    (found, *_) = ranks.run(geometry, work)
    return found
