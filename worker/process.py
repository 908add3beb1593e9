"""The life of a worker process, the same for both roles: load, listen, announce, serve, drain. Knows no role's work."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from prometheus_client import CollectorRegistry, ProcessCollector

from cache_transfer.channels.host import Process
from cache_transfer.load import CacheLoader
from cache_transfer.memory import tune_allocator
from cache_transfer.store import CacheStore
from slipstream import process
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.observability.transfer_metrics import TransferMetrics
from slipstream.rpc import security
from slipstream.rpc.security import Security
from slipstream.rpc.server import bound, join_address, listen, new_server, split_address
from slipstream.types import Role
from worker import ranks
from worker.follower import FollowingReplica
from worker.metrics import MetricsServer, metrics_target, reachable
from worker.replica import Replica
from worker.service import Identity, WorkerService
from worker.transfers import RankTransfers, serve_rank

logger = logging.getLogger(__name__)

Mount = Callable[[Identity, Replica, CacheStore, CacheLoader], WorkerService]
"""Puts a role's work on a replica."""

STOP_SECONDS = 1.0
"""How long streams that are still open may take to end after a drain."""


def main(role: Role, mount: Mount, arguments: Sequence[str] | None = None) -> int:
    """Run the process; its exit status: 0 after a drain, 1 if the engine died, 2 for a wrong configuration."""
    parser = process.parser(role.value, f"Serve one {role.value} replica.")
    parser.add_argument("--replica-id", default=f"{role.value}-0", help="name of this replica, unique in the deployment")
    parser.add_argument("--epoch", type=int, default=1, help="a number that differs after every restart")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port or [v6]:port; port 0: any free one")
    parser.add_argument("--advertise", default="",
                        help="host or host:port that routers and peers connect to; needed when listening on a wildcard")
    parser.add_argument("--metrics-listen", metavar="HOST:PORT",
                        help="where GET /metrics is answered; not given: the host of --listen, any free port; empty: nowhere")
    parser.add_argument("--pool", default="", help="the pool of the configuration that this replica belongs to; needed if "
                                                   "several pools are for its role")
    parser.add_argument("--rank", type=int, default=0, help="of this process in a replica of several ranks (pools.NAME.tp, pp)")
    parser.add_argument("--world", type=int, default=0, help="ranks of the replica, if it is to be checked")
    parser.add_argument("--master", default="", metavar="HOST:PORT", help="where rank 0 listens for the other ranks")
    parsed = parser.parse_args(arguments)
    try:
        config = process.start(parsed, parsed.replica_id)
        advertised(parsed.listen, parsed.advertise)  # a mistake here must not cost a minute of loading first
        trusted = security.load(config.security)
        place = ranks.place(config, role, pool=parsed.pool, rank=parsed.rank, world=parsed.world, master=parsed.master,
                            epoch=parsed.epoch, token=trusted.token)
        bound(parsed.listen, "--listen").close()
        if target := metrics_target(parsed.listen, parsed.metrics_listen):
            bound(target, "--metrics-listen").close()
        tune_allocator()
        if place is not None and place.shard.rank > 0:
            _leave(asyncio.run(_follow(parsed, role, FollowingReplica(config, role, place), trusted)))
        replica = Replica(config, role, place)
        identity = Identity(replica_id=parsed.replica_id, epoch=parsed.epoch, role=role)
        status = asyncio.run(_serve(parsed, identity, replica, mount, trusted))
        if place is not None:
            _leave(status)
        return status
    except SlipstreamError as error:
        logger.error("cannot start: %s", error)
        return 2


async def _serve(arguments: argparse.Namespace, identity: Identity, replica: Replica, mount: Mount, trusted: Security) -> int:
    store, loader = replica.channel_ends(replica_id=identity.replica_id, epoch=identity.epoch,
                                         host=split_address(arguments.listen)[0], security=trusted)
    service = mount(identity, replica, store, loader)
    service.host = Process.here().boot
    service.channels, service.transfers = store.channels, RankTransfers(store.transfers, trusted)
    store.transfers.metrics = TransferMetrics(service.metrics.registry, identity.role, store.transfers.quarantined)
    server = new_server(trusted)
    service.add_to(server)
    store.add_to(server)
    service.address = advertised(await listen(server, arguments.listen, trusted), arguments.advertise)
    if replica.gang is not None:
        service.other_addresses = await asyncio.to_thread(replica.gang.addresses, ranks.LOAD_SECONDS)
    stop = process.stop_event()  # until now there is nothing to drain, and a signal ends the process
    metrics = MetricsServer(service.metrics.registry)
    if target := metrics_target(arguments.listen, arguments.metrics_listen):
        service.metrics_address = reachable(await metrics.listen(target), arguments.listen, service.address)
    await service.start()
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, asked.set)
    logs = asyncio.create_task(service.log_insides(asked))
    process.announce(replica_id=identity.replica_id, role=identity.role.value, address=service.address, epoch=identity.epoch,
                     pid=os.getpid(), metrics=service.metrics_address)
    signals = [asyncio.create_task(stop.wait()), asyncio.create_task(service.dead.wait())]
    await asyncio.wait(signals, return_when=asyncio.FIRST_COMPLETED)
    died = service.dead.is_set()
    if not died:
        unfinished = await service.drain(replica.config.router.drain_seconds)
        logger.info("drained; %d requests were cut off", unfinished)
    service.end_sessions()
    await server.stop(STOP_SECONDS)
    metrics.close()
    await loader.close()
    await service.stop()
    if replica.gang is not None:
        replica.gang.close()
    for task in (*signals, logs):
        task.cancel()
    return 1 if died else 0


async def _follow(arguments: argparse.Namespace, role: Role, replica: FollowingReplica, trusted: Security) -> int:
    """Another rank than rank 0, which ends it: it drains, and a first signal to all ranks must not end this one meanwhile."""
    process.stop_event()
    store, loader = replica.channel_ends(replica_id=arguments.replica_id, epoch=arguments.epoch,
                                         host=split_address(arguments.listen)[0], security=trusted)
    server = new_server(trusted)
    store.add_to(server)
    serve_rank(server, store.transfers)
    address = advertised(await listen(server, arguments.listen, trusted), arguments.advertise)
    registry = CollectorRegistry()  # rank 0 counts the requests
    ProcessCollector(registry=registry)
    store.transfers.metrics = TransferMetrics(registry, role, store.transfers.quarantined)
    metrics, shown = MetricsServer(registry), ""
    if target := metrics_target(arguments.listen, arguments.metrics_listen):
        shown = reachable(await metrics.listen(target), arguments.listen, address)
    process.announce(replica_id=arguments.replica_id, rank=arguments.rank, address=address, epoch=arguments.epoch,
                     pid=os.getpid(), metrics=shown)
    try:
        await replica.follow(store, loader, address)
    except SlipstreamError as error:
        logger.critical("this rank ends: %s", error)
        return 1
    except Exception as error:
        logger.critical("this rank ends by a fault: %r", error, exc_info=error)
        return 1
    metrics.close()
    await server.stop(STOP_SECONDS)
    await loader.close()
    return 0


def _leave(status: int) -> NoReturn:
    """End a process that has groups of ranks, now that all is said: their threads abort it while the interpreter goes down."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def advertised(listening: str, advertise: str) -> str:
    """The address that others are told. Raises ConfigError for one that they could not connect to.

    `advertise` may leave out the port: it is that of `listening` then.
    """
    host, port = split_address(listening)
    if advertise:
        try:
            host, port = split_address(advertise)
        except ConfigError:
            host = advertise.removeprefix("[").removesuffix("]")
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False  # a name
    if wildcard or not host:
        raise ConfigError(f"{host} is no address that others can connect to; say which one they should use: --advertise HOST")
    return join_address(host, port)
