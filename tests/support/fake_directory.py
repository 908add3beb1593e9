"""A fake directory: a real gRPC server that tells routers which workers exist."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from slipstream.rpc.server import listen, new_server
from slipstream.v1 import directory_pb2, directory_pb2_grpc
from tests.support.fake_workers import FakeWorker


class FakeDirectory(directory_pb2_grpc.DirectoryServicer):
    """Tells routers what the test says exists."""

    def __init__(self) -> None:
        self.address = ""
        self._snapshot = directory_pb2.Snapshot()
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = new_server()
        directory_pb2_grpc.add_DirectoryServicer_to_server(self, self._server)
        self.address = await listen(self._server, "127.0.0.1:0")

    async def stop(self) -> None:
        """End at once."""
        if self._server is not None:
            await self._server.stop(grace=None)

    def show(self, *workers: FakeWorker, restarting: Sequence[directory_pb2.Endpoint] = ()) -> None:
        """These exist now, and no others."""
        self._snapshot = directory_pb2.Snapshot(restarting=restarting, endpoints=[
            directory_pb2.Endpoint(replica_id=one.info.replica_id, role=one.info.role, address=one.address,
                                   epoch=one.info.epoch) for one in workers])
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[directory_pb2.Snapshot]:  # noqa: N802
        """What was shown last, and again after each change."""
        while True:
            changed = self._changed
            yield self._snapshot
            await changed.wait()

    async def Scale(self, request: Any, context: Any) -> directory_pb2.ScaleReply:  # noqa: N802
        """No router asks for it."""
        raise NotImplementedError
