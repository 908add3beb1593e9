"""Where a replica's ranks, or a router, run: a placement group, and in it an actor beside each process. Knows no role's logic.

Ray is imported inside functions: importing it changes the environment and the import path of the process.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import members
from launch.child import ChildProcess, describe
from launch.members import Member
from launch.session import node_address
from slipstream.errors import LaunchError, PlacementError, SlipstreamError
from slipstream.rpc.server import join_address, reserved

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

WAIT_SECONDS = 30.0
ANSWER_SECONDS = 5.0
"""An actor that says nothing for so long is given up."""
RETRY_SECONDS = 0.5
GANG_END_SECONDS = 5.0
"""How long the other ranks of a replica may take to end after the first one."""


class Place:
    """Room that Ray keeps for the processes of one member, and the actors that hold those of the moment, by rank.

    Every coroutine raises LaunchError when an actor, its node or the cluster is lost.
    """

    def __init__(self, member: Member, group: PlacementGroup, *, lifetime: str | None, hosts: Sequence[Any] = (),
                 epoch: int = 0, adopted: Mapping[str, Any] | None = None) -> None:
        self.member = member
        self.group = group
        self.epoch = epoch
        """Of the actors' processes; 0 before the first ones."""
        self.adopted = adopted
        """What rank 0's Host.state said of processes that an earlier supervisor started."""
        self._lifetime = lifetime
        self._hosts = list(hosts)

    def new_hosts(self) -> None:
        """Start actors for the next epoch, in the background; those that were there end, and their processes with them."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.kill()
        self.epoch += 1
        member, share = self.member, dict(self.member.share)
        for rank in range(member.world):
            bundle = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank // member.tp)
            options = {
                "num_cpus": share["CPU"], "num_gpus": member.gpus, "max_restarts": 0, "max_concurrency": 16,
                "resources": {key: value for key, value in share.items() if key not in ("CPU", "GPU")},
                "scheduling_strategy": bundle, "name": host_name(member.name, self.epoch, rank), "lifetime": self._lifetime,
            }
            self._hosts.append(ray.remote(Host).options(**options).remote(member.title(rank), member.identity))

    @property
    def log(self) -> str:
        """Folder of an adopted process's log."""
        return str(Path(self.adopted["log"]).parent) if self.adopted is not None else ""

    async def start(self, directory: str, port: int, log_dir: Path, *, local: bool) -> None:
        """Start `python -m` for every rank; `directory` and `port` as in Member.arguments."""
        member, hosts = self.member, self._hosts
        addresses = ["127.0.0.1"] * len(hosts) if local else await self._all(host.address.remote() for host in hosts)
        master = str(await self._result(hosts[0].reserved_address.remote(addresses[0]))) if len(hosts) > 1 else ""
        starts = []
        for rank, (host, address) in enumerate(zip(hosts, addresses, strict=True)):
            arguments = member.arguments(host=address, epoch=self.epoch, directory=directory, port=port, rank=rank,
                                         master=master)
            log = log_dir / f"{member.title(rank).replace(' ', '-')}.log"
            starts.append(host.start.remote(arguments, dict(member.env), member.gpus, str(log)))
        await self._all(starts)

    async def ready(self, timeout_seconds: float) -> dict[str, Any]:
        """Rank 0's ready line; LaunchError also when any rank ends first, or is late."""
        lines = await self._all(host.ready.remote(timeout_seconds) for host in self._hosts)
        return dict(lines[0])

    async def wait(self, gone: Callable[[], Awaitable[bool]]) -> str:
        """How the processes ended, once one has; the others have ended then as well, or were ended.

        `gone` is asked when rank 0's actor cannot be reached, whether its process serves no more. LaunchError then.
        """
        hosts = self._hosts  # `kill` may come between two waits
        waits = [asyncio.create_task(self._status(host, gone if rank == 0 else None)) for rank, host in enumerate(hosts)]
        try:
            ended, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if left and all(one.exception() is None for one in ended):
                ended, left = await asyncio.wait(waits, timeout=GANG_END_SECONDS)
            if left:
                await self._end([host for host, one in zip(hosts, waits, strict=True) if one in left])
            # A signal came from outside; the other ranks end with a status, because of it.
            code, rank = min((one.result(), rank) for rank, one in enumerate(waits) if one in ended)
        finally:
            for one in waits:
                one.cancel()
        return describe(code) + (f" of rank {rank}" if len(hosts) > 1 else "")

    async def _status(self, host: Any, gone: Callable[[], Awaitable[bool]] | None) -> int:
        """A process's exit status, once it has ended. Of other ranks than 0, a lost actor says nothing: rank 0 will."""
        while True:
            try:
                if (code := await self._result(host.wait.remote(WAIT_SECONDS))) is not None:
                    return int(code)
            except LaunchError:
                if gone is not None and await gone():
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def tell(self, value: Any) -> None:
        """See ChildProcess.tell."""
        await self._result(self._hosts[0].tell.remote(value))

    async def end(self) -> None:
        """End the processes at once; `wait` says so. Actors that do not answer are ended themselves."""
        await self._end(self._hosts)

    async def _end(self, hosts: Sequence[Any]) -> None:
        import ray

        async def end(host: Any) -> None:
            try:
                await asyncio.wait_for(self._result(host.end.remote()), ANSWER_SECONDS)
            except (TimeoutError, LaunchError):
                if host in self._hosts:  # else the next epoch has begun
                    ray.kill(host)

        await asyncio.gather(*(end(host) for host in hosts))

    async def stop(self, grace_seconds: float) -> int:
        """Drain and end rank 0, which ends the others; 0, or an exit status that is not."""
        try:
            async with asyncio.timeout(grace_seconds + GANG_END_SECONDS + ANSWER_SECONDS):
                return await self._stop(grace_seconds)
        except TimeoutError as error:
            raise LaunchError(f"{self.member.name}: the Ray actor of a process does not answer") from error

    async def _stop(self, grace_seconds: float) -> int:
        codes = [await self._result(self._hosts[0].stop.remote(grace_seconds))]
        others = self._hosts[1:]
        waited = await self._all(host.wait.remote(GANG_END_SECONDS) for host in others)
        late = [host for host, code in zip(others, waited, strict=True) if code is None]
        codes += [code for code in waited if code is not None] + await self._all(host.stop.remote(0) for host in late)
        return next((int(code) for code in codes if code), 0)

    def kill(self) -> None:
        """End the actors at once; their processes see that and end too."""
        import ray

        hosts, self._hosts = self._hosts, []
        for host in hosts:
            ray.kill(host)

    def release(self) -> None:
        """Give the room back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)

    async def _all(self, references: Iterable[Awaitable[Any]]) -> list[Any]:
        return list(await asyncio.gather(*(self._result(one) for one in references)))

    async def _result(self, reference: Awaitable[Any]) -> Any:
        import ray.exceptions

        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, SlipstreamError) else LaunchError(f"{self.member.name}: {error}")) from error
        except ray.exceptions.RayError as error:
            check_installed(error)
            raise LaunchError(f"{self.member.name} lost its Ray actor: {type(error).__name__}") from error


def reserve(wanted: Sequence[Member], left: Mapping[str, Place], deployment: str, wait_seconds: float, *,
            lifetime: str | None) -> list[Place]:
    """One place per member, that of `left` or a new one, all of them or none; blocks for at most about `wait_seconds`.

    Raises PlacementError naming the first bundle that has no place and what each node lacks.
    """
    import ray
    from ray.util.placement_group import placement_group

    new = {}
    for one in wanted:
        if one.name not in left:
            bundles = [one.bundle] * (one.world // one.tp)
            group = placement_group(bundles, strategy="PACK", bundle_label_selector=[one.labels] * len(bundles),
                                    lifetime=lifetime, name=f"{prefix(deployment)}{one.name}/{secrets.token_hex(4)}")
            new[one.name] = Place(one, group, lifetime=lifetime)
    places = list(new.values())
    deadline = time.monotonic() + wait_seconds
    missing = [place for place in places if not place.group.wait(max(0.1, deadline - time.monotonic()))]
    if not missing:
        return [new.get(one.name) or left[one.name] for one in wanted]
    nodes = [members.Node(address=node["NodeManagerAddress"], total=node["Resources"], labels=node["Labels"])
             for node in ray.nodes() if node["Alive"]]
    text = members.explain(missing[0].member, nodes, ray.available_resources())
    for place in places:
        place.release()
    raise PlacementError(f"{text} (waited {wait_seconds:g} s; see ray.placement_seconds)")


def check_installed(error: Exception) -> None:
    """Raise LaunchError if this error of an actor says that its node cannot import our packages."""
    if "failed to import on the worker" in str(error):
        where = re.search(r"ip=([^,)]+)", str(error))
        node, why = where[1] if where else "?", str(error).strip().splitlines()[-1]
        raise LaunchError(f"node {node} of the Ray cluster cannot import Slipstream: install this version on "
                          "every node, or submit `serve` as a Ray job whose working_dir holds it (see the README): "
                          f"{why}") from error


def host_name(name: str, epoch: int, rank: int) -> str:
    """Name of the actor of one process."""
    return f"{name}/{epoch}/{rank}" if rank else f"{name}/{epoch}"


def prefix(deployment: str) -> str:
    """What the names of a deployment's placement groups begin with."""
    return f"slipstream/{deployment}/"


class Host:
    """The actor beside every process: starts it on its node and waits for it. Methods run in threads of their own."""

    def __init__(self, name: str, identity: str) -> None:
        self._name = name
        self._identity = identity
        self._child: ChildProcess | None = None
        self._reserved: socket.socket | None = None

    def address(self) -> str:
        """Of this node, as the other nodes see it."""
        return node_address()

    def reserved_address(self, host: str) -> str:
        """An address of this node that is for its process alone: a socket that is bound there, but does not listen, keeps the
        port from everybody who takes any free one."""
        self._reserved = reserved(host)
        return join_address(host, int(self._reserved.getsockname()[1]))

    def start(self, arguments: Sequence[str], env: Mapping[str, str], gpus: int, log_path: str) -> int:
        """Start `python -P -m` with `arguments` (-P: no module of the current folder is taken for ours); its pid."""
        import ray

        ids = [str(one) for one in ray.get_gpu_ids()] if gpus else []
        code = str(Path(members.__file__).parents[1])
        installed = code in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
        environment = members.child_environment(os.environ, env, ids, "" if installed else code)
        command = [sys.executable, "-P", "-m", *arguments]
        self._child = ChildProcess(self._name, command, environment, Path(log_path))
        return self._child.pid

    def ready(self, timeout_seconds: float) -> dict[str, Any]:
        """See ChildProcess.ready."""
        return self._started().ready(timeout_seconds)

    def state(self) -> dict[str, Any]:
        """For a supervisor that finds it: Member.identity, the ready line (None: it does not serve), the log's path, and the id
        of its placement group."""
        import ray

        child = self._child
        return {"identity": self._identity, "ready": child and child.serving, "log": str(child.log_path) if child else "",
                "group": ray.get_runtime_context().get_placement_group_id()}

    def wait(self, timeout_seconds: float) -> int | None:
        """See ChildProcess.wait; one that nobody awaits any more must not keep its thread for ever."""
        return self._started().wait(timeout_seconds)

    def tell(self, value: Any) -> None:
        """See ChildProcess.tell."""
        self._started().tell(value)

    def end(self) -> None:
        """See ChildProcess.kill."""
        self._started().kill()

    def stop(self, grace_seconds: float) -> int:
        """Drain and end the process; its exit status, 0 also when none was started."""
        return self._child.stop(grace_seconds) if self._child is not None else 0

    def _started(self) -> ChildProcess:
        assert self._child is not None, "start comes first"
        return self._child
