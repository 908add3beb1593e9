"""All workers that a router knows, and where it hears of them: a fixed list, the supervisor's Directory, names of DNS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Sequence

import grpc
import grpc.aio

from router.breaker import Breakers
from router.link import WorkerLink
from router.policy import Replica
from router.prefix_index import PrefixIndex
from slipstream.errors import IncompatibleError, UnavailableError
from slipstream.rpc.channel import connect, reason
from slipstream.rpc.security import OPEN, Security
from slipstream.rpc.server import join_address, split_address
from slipstream.types import Role
from slipstream.v1 import directory_pb2, directory_pb2_grpc, worker_pb2

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.5
_FIXED, _DIRECTORY = "", "directory"


class Workers:
    """All links. The sources add up: a worker is wanted while any of them names it."""

    def __init__(self, model_name: str, on_change: Callable[[], None], silence_seconds: float = 10.0,
                 security: Security = OPEN, index: PrefixIndex | None = None, breakers: Breakers | None = None) -> None:
        """`index`: hears what the prefix caches of all workers hold."""
        self.breakers = breakers or Breakers(0, 0.0, lambda role: None)
        self._links: dict[str, WorkerLink] = {}
        self._model_name = model_name
        self._silence_seconds = silence_seconds
        self._security = security
        self._index = index
        self._on_change = on_change
        self._sources: dict[str, frozenset[str]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.restarting: Sequence[directory_pb2.Endpoint] = ()
        """Replicas that the supervisor starts again."""
        self.directory = ""
        """Address of the supervisor's Directory; empty: there is none."""

    def add(self, address: str) -> None:
        """Connect, and stay connected."""
        self._known(_FIXED, {*self._sources.get(_FIXED, ()), address})

    def _check(self, link: WorkerLink, info: worker_pb2.WorkerInfo) -> None:
        if info.model_name != self._model_name:
            raise IncompatibleError(f"{info.replica_id} serves {info.model_name}, this router {self._model_name}")
        for other in self._links.values():
            if other is not link and not other.leaving and other.info and other.info.replica_id == info.replica_id:
                raise IncompatibleError(f"the worker at {other.address} is called {info.replica_id} too: --replica-id")

    def watch(self, directory: str) -> None:
        """Follow the Directory at this address, and no other from now on. While it is gone the known workers go on serving."""
        if _DIRECTORY in self._watches:
            self._watches[_DIRECTORY].cancel()
        self.directory = directory
        self._watches[_DIRECTORY] = asyncio.create_task(self._follow(directory), name="directory")

    def resolve(self, name: str, seconds: float) -> None:
        """The workers at every address of `host:port`, as of a headless service, looked up every so many seconds. Raises
        ConfigError for what is no host and port."""
        split_address(name)
        self._watches[name] = asyncio.create_task(self._resolve(name, seconds), name=f"dns {name}")

    async def close(self) -> None:
        """End every connection."""
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))

    def _changed(self) -> None:
        """A worker came, was lost, or ended the last request that kept it."""
        for address in [address for address, link in self._links.items() if link.leaving and link.idle]:
            closing = asyncio.create_task(self._links.pop(address).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        news, self._news = self._news, asyncio.Event()
        news.set()
        self._on_change()

    async def change(self, seconds: float) -> None:
        """Wait until a worker comes or goes, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)

    def link(self, address: str) -> WorkerLink:
        """Raises UnavailableError for a worker that has left."""
        link = self._links.get(address)
        if link is None:
            raise UnavailableError(f"the worker at {address} has left", retry_after_seconds=1.0)
        return link

    def links(self) -> list[WorkerLink]:
        """Connected or not."""
        return list(self._links.values())

    def views(self) -> list[Replica]:
        """Of the connected ones."""
        return [view for link in self._links.values() if (view := link.view()) is not None]

    def count(self, role: Role) -> int:
        """Connected replicas of a role."""
        return sum(view.role is role for view in self.views())

    # Who says which workers there are -------------------------------------------------------------------------------------

    def _known(self, source: str, addresses: Collection[str]) -> None:
        """A source says which workers there are. One that no source knows any more gets nothing new, and is forgotten at the
        end of its last request."""
        self._sources[source] = frozenset(addresses)
        known = frozenset[str]().union(*self._sources.values())
        for address in known - self._links.keys():
            self._links[address] = WorkerLink(address, self._check, self._changed, self._silence_seconds, self._security,
                                              self._index)
        for address, link in self._links.items():
            link.leaving = address not in known
        self._changed()

    async def _follow(self, directory: str) -> None:
        channel, told = connect(directory, self._security), False
        try:
            while True:
                try:
                    async for snapshot in directory_pb2_grpc.DirectoryStub(channel).Watch(directory_pb2.WatchRequest()):
                        told = False
                        self.restarting = snapshot.restarting
                        self._known(_DIRECTORY, {one.address for one in snapshot.endpoints})
                except grpc.aio.AioRpcError as error:
                    level = logging.DEBUG if told else logging.WARNING
                    logger.log(level, "the directory at %s is gone: %s; known workers stay", directory, reason(error))
                    told = True
                except Exception:
                    logger.exception("what the directory at %s said could not be used; known workers stay", directory)
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            await channel.close()

    async def _resolve(self, name: str, seconds: float) -> None:
        """Ask for a name's addresses again and again, of one family, as a worker may have one of each. While it has none, or
        nobody answers, the known ones stay."""
        host, port = split_address(name)
        told = ""
        while True:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = frozenset(join_address(str(where[0]), port) for family, *_, where in found if family == found[0][0])
                if addresses != self._sources.get(name):
                    logger.info("%s names %d workers", name, len(addresses))
                    self._known(name, addresses)
                told = ""
            except OSError as error:
                if str(error) != told:
                    logger.warning("%s names no worker: %s; known workers stay", name, error.strerror or error)
                told = str(error)
            await asyncio.sleep(seconds)
