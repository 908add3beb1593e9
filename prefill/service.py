"""Puts the prefill role on a replica: its worker, its pictures, its gRPC service."""

from __future__ import annotations

from cache_transfer.load import CacheLoader
from cache_transfer.store import CacheStore
from prefill.images import ImageIntake, ImageStore
from prefill.worker import PrefillWorker
from slipstream.block_hash import content_hash
from worker.gang import GangLoader, GangStore
from worker.replica import Replica
from worker.service import Identity, WorkerService
from worker.turns import CacheBorrower


def mount(identity: Identity, replica: Replica, store: CacheStore, loader: CacheLoader) -> WorkerService:
    """The Worker service of a prefill replica; only a model that sees takes pictures."""
    source = store if replica.gang is None else GangStore(store, replica.gang)
    destination = loader if replica.gang is None else GangLoader(loader, replica.gang)
    images = ImageStore(replica.config.transfer.image_store_bytes)
    image = replica.checkpoint.image
    intake = ImageIntake(images, image.factor, content_hash) if image is not None else None
    worker = PrefillWorker(replica, source, images, CacheBorrower(replica, destination))
    return WorkerService(identity, replica, worker, intake.take if intake is not None else None)
