"""The Directory service: tells routers which workers exist now, and takes wishes for more or fewer. Knows neither Ray nor how
a worker is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from slipstream.errors import LaunchError, SlipstreamError
from slipstream.rpc.channel import connect_blocking
from slipstream.rpc.security import OPEN, Security
from slipstream.types import Role
from slipstream.v1 import directory_pb2 as pb
from slipstream.v1 import directory_pb2_grpc, worker_pb2

SCALE_SECONDS = 3600.0
"""Longest wait for a scaling: the supervisor has shorter limits of its own."""

Scale = Callable[[Mapping[str, int]], Awaitable[Mapping[str, int]]]
"""Takes replicas by pool, returns those of every pool. Raises SlipstreamError."""

_ROLES = {Role.PREFILL: worker_pb2.ROLE_PREFILL, Role.DECODE: worker_pb2.ROLE_DECODE}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A worker that serves, or is being started again."""

    replica_id: str
    role: Role
    epoch: int
    address: str = ""
    """Empty: it does not serve now, and `epoch` is the next one."""
    problem: str = ""
    """Why it does not serve."""


class Directory(directory_pb2_grpc.DirectoryServicer):
    """A set of endpoints that can be watched; belongs to one asyncio loop."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._endpoints: dict[str, Endpoint] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, endpoint: Endpoint) -> None:
        """Add a worker, or replace an earlier epoch of it. Raises LaunchError for a replica id that is taken."""
        known = self._endpoints.get(endpoint.replica_id)
        if known is not None and known.address and known.epoch >= endpoint.epoch:
            raise LaunchError(f"two workers are called {endpoint.replica_id}: at {known.address}, epoch {known.epoch}, and at "
                              f"{endpoint.address}, epoch {endpoint.epoch}")
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

    async def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleReply:  # noqa: N802 (gRPC's name)
        """See Supervisor.scale."""
        try:
            return pb.ScaleReply(replicas=await self._scale(dict(request.replicas)))
        except SlipstreamError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], error.message)
            raise

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _snapshot(self) -> pb.Snapshot:
        snapshot = pb.Snapshot()
        for one in self._endpoints.values():
            rows = snapshot.endpoints if one.address else snapshot.restarting
            rows.add(replica_id=one.replica_id, role=_ROLES[one.role], address=one.address, epoch=one.epoch,
                     problem=one.problem)
        return snapshot


def scale(address: str, replicas: Mapping[str, int], security: Security = OPEN) -> dict[str, int]:
    """Ask the supervisor at `address`; the replicas of every pool, once it is done. Raises LaunchError with its refusal."""
    with connect_blocking(address, security) as channel:
        try:
            reply = directory_pb2_grpc.DirectoryStub(channel).Scale(pb.ScaleRequest(replicas=replicas), timeout=SCALE_SECONDS,
                                                                    metadata=security.metadata)
        except grpc.RpcError as error:
            code, said = error.code(), str(error.details())
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED) and security == OPEN:
                said += "; if the deployment has [security], name its configuration with --config"
            there = f"the supervisor at {address}: " if code is grpc.StatusCode.UNAVAILABLE else ""
            raise LaunchError(there + said) from error
    return dict(reply.replicas)
