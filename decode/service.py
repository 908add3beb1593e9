"""Puts the decode role on a replica: its worker and its gRPC service."""

from __future__ import annotations

from cache_transfer.load import CacheLoader
from cache_transfer.store import CacheStore
from decode.worker import DecodeWorker
from worker.gang import GangLoader, GangStore
from worker.replica import Replica
from worker.service import Identity, WorkerService
from worker.turns import CacheLender


def mount(identity: Identity, replica: Replica, store: CacheStore, loader: CacheLoader) -> WorkerService:
    """The Worker service of a decode replica."""
    destination = loader if replica.gang is None else GangLoader(loader, replica.gang)
    source = store if replica.gang is None else GangStore(store, replica.gang)
    return WorkerService(identity, replica, DecodeWorker(replica, destination, CacheLender(replica, source)))
