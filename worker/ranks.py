"""How the ranks of a replica find each other: rank 0 listens, the others come, then the tensor ranks meet. Knows no request."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slipstream import sharding
from slipstream.config import Config, PoolConfig
from slipstream.engine import build
from slipstream.errors import ConfigError, GangError
from slipstream.layers import parallel
from slipstream.layers.parallel import Communicator
from slipstream.rpc.server import bound, join_address, split_address
from slipstream.sharding import Shard
from slipstream.types import Role
from worker.entries import Down, Up
from worker.gang import GangLog
from worker.link import Follower, Hello, Leader

logger = logging.getLogger(__name__)

MEET_SECONDS = 120.0
"""Longest wait for all ranks to come: they start together."""
LOAD_SECONDS = 1800.0
"""Longest wait for the other ranks' weights once our own are here: a disk may be slow, and a rank that ends is noticed."""
STEP_SECONDS = 60.0
"""A rank that takes no part in a step for so long is lost."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank of which replica a process is."""

    shard: Shard
    master: tuple[str, int]
    """Where rank 0 listens."""
    epoch: int
    token: str = field(default="", repr=False)
    """Of the deployment; empty: whoever reaches rank 0 may say that it is a rank."""


def pool_of(config: Config, role: Role, name: str) -> PoolConfig:
    """The pool that a process belongs to: that of the name, or the only one of its role. Raises ConfigError."""
    if name:
        if name not in config.pools:
            raise ConfigError(f"there is no pool {name!r}; pools: {', '.join(config.pools) or 'none'}", field="pools")
        if config.pools[name].role is not role:
            raise ConfigError(f"pool {name} is for {config.pools[name].role.value}, not for {role.value}", field="pools")
        return config.pools[name]
    own = {name: pool for name, pool in config.pools.items() if pool.role is role}
    if len({(pool.tp, pool.pp, pool.stages, pool.expert_parallel) for pool in own.values()}) > 1:
        raise ConfigError(f"several pools are for {role.value}: say which one with --pool ({', '.join(own)})", field="pools")
    return next(iter(own.values()), PoolConfig(role=role))


def place(config: Config, role: Role, *, pool: str, rank: int, world: int, master: str, epoch: int,
          token: str = "") -> Place | None:
    """None: the replica is this one process. `world` 0: as the pool says. Raises ConfigError for what does not fit."""
    wanted = pool_of(config, role, pool)
    if (wanted.tp, wanted.pp, wanted.stages, rank) == (1, 1, (), 0) and world in (0, 1):
        return None
    checkpoint = build.checkpoint_of(config)
    geometry = sharding.plan(checkpoint, tp=wanted.tp, pp=wanted.pp, stages=wanted.stages,
                             expert_parallel=wanted.expert_parallel)
    if world not in (0, geometry.world) or not 0 <= rank < geometry.world:
        raise ConfigError(f"rank {rank} of {world or geometry.world}: the pool has tp {geometry.tp} and pp {geometry.pp}, so "
                          f"{geometry.world} ranks, from 0 on", field="pools")
    if geometry.world == 1:
        return None
    if config.security.tls_cert and not token:
        raise ConfigError(f"pool {pool or role.value} has {geometry.world} ranks, which prove themselves by the token, not "
                          "by certificates: set security.token_file too", field="security.token_file")
    try:
        host, port = split_address(master)
        if not port:
            raise ConfigError("port 0 would be another one on each rank", field="master")
    except ConfigError as error:
        raise ConfigError(f"a replica of {geometry.world} ranks needs --master HOST:PORT, where its rank 0 listens: "
                          f"{error.message}", field="master") from error
    return Place(shard=Shard(geometry=geometry, rank=rank), master=(host, port), epoch=epoch, token=token)


def lead(place: Place, fingerprint: str, device: torch.device) -> tuple[GangLog, Communicator]:
    """Rank 0: wait for the others. Blocks; raises GangError."""
    host, port = place.master
    leader: Leader[Any, Up] = Leader(host, port, world=place.shard.geometry.world, epoch=place.epoch,
                                     fingerprint=_digest(place, fingerprint), up=Up, token=place.token)
    store = _store(host)
    leader.gather(MEET_SECONDS, store.port)
    log = GangLog(leader, _end)
    return log, _meet(place, store, device, host)


def _store(host: str) -> TCPStore:
    """Bound to this address alone: left to itself, it listens on every interface."""
    listener = bound(join_address(host, 0), "--master")
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEET_SECONDS),
                    master_listen_fd=listener.detach())


def follow(place: Place, fingerprint: str, device: torch.device) -> tuple[Follower[Down], Communicator]:
    """Another rank: find rank 0. Blocks; raises GangError."""
    host, port = place.master
    shard = place.shard
    hello = Hello(rank=shard.rank, world=shard.geometry.world, epoch=place.epoch, fingerprint=_digest(place, fingerprint))
    link: Follower[Down] = Follower(host, port, hello, down=Down, timeout_seconds=MEET_SECONDS, token=place.token)
    link.start(_end)
    store = TCPStore(host, link.welcome.store_port, is_master=False, timeout=timedelta(seconds=MEET_SECONDS))
    return link, _meet(place, store, device, link.own_address)


def _meet(place: Place, store: TCPStore, device: torch.device, address: str) -> Communicator:
    try:
        return parallel.connect(place.shard, store, device, timedelta(seconds=STEP_SECONDS), address=address)
    except RuntimeError as error:
        raise GangError(f"the ranks of this replica do not meet: {error}") from error


def _digest(place: Place, fingerprint: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{place.shard.geometry} {fingerprint}".encode())


def _end(reason: str) -> None:
    """A replica without one of its ranks is none: routers see the connection go and resume elsewhere, the others see it too. At
    once: this rank may wait in a step for the one that is lost."""
    logger.critical("%s; this rank ends", reason)
    os._exit(1)
