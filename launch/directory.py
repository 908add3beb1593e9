"""The Directory service: tells routers which workers exist now. Knows neither Ray nor how a worker is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from slipstream.types import Role
from slipstream.v1 import directory_pb2 as pb
from slipstream.v1 import directory_pb2_grpc, worker_pb2

_ROLES = {Role.PREFILL: worker_pb2.ROLE_PREFILL, Role.DECODE: worker_pb2.ROLE_DECODE}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A worker that serves."""

    replica_id: str
    role: Role
    address: str
    epoch: int


class Directory(directory_pb2_grpc.DirectoryServicer):
    """A set of endpoints that can be watched; belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, endpoint: Endpoint) -> None:
        """Add a worker, or replace the one of the same replica id."""
        self._endpoints[endpoint.replica_id] = endpoint
        self._notify()

    def remove(self, replica_id: str) -> None:
        """Forget a worker; unknown ids are none of our business."""
        if self._endpoints.pop(replica_id, None) is not None:
            self._notify()

    def close(self) -> None:
        """End every Watch."""
        self._closed = True
        self._notify()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Snapshot]:  # noqa: N802 (gRPC's name)
        """All endpoints at once, and again after every change; a slow watcher skips what it missed."""
        while not self._closed:
            changed = self._changed
            yield self._snapshot()
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _snapshot(self) -> pb.Snapshot:
        return pb.Snapshot(endpoints=[
            pb.Endpoint(replica_id=one.replica_id, role=_ROLES[one.role], address=one.address, epoch=one.epoch)
            for one in self._endpoints.values()
        ])
