"""Where processes run: a Ray session, and per process a placement group and an actor that holds it. Knows no role's logic.

Ray is imported inside functions: importing it changes the environment and the import path of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import members, processes
from launch.child import ChildProcess, describe
from launch.members import Member
from slipstream.errors import LaunchError, PlacementError, SlipstreamError
from slipstream.rpc.server import split_address

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

LONGEST_TEMP_PATH = 40
"""Ray puts sockets below its folder, and a socket's path may have 107 bytes."""
OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: no bytes of ours travel through its object store."""
END_SECONDS = 10.0
CONNECT_SECONDS = 5.0
WAIT_SECONDS = 30.0
ANSWER_SECONDS = 5.0
"""An actor that says nothing for so long is given up."""
GPU_SECONDS = 60.0


class Session:
    """A connection to Ray. Without an address a cluster is started on this machine, and only that one is ever ended."""

    def __init__(self, address: str, deployment: str, *, cpus: float, gpus: int) -> None:
        """Blocks for some seconds. Raises LaunchError if no cluster answers at `address`, or none can be started."""
        self._temp_dir: Path | None = None
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # masks are set in `child_environment`
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": f"slipstream-{deployment}"}
        try:
            if address:
                _check_reachable(address)
                ray.init(address=address, **quiet)
            else:
                self._temp_dir = _short_temp_dir()
                # Ray listens on every interface: only whoever holds this session's token may talk to it.
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
                ray.init(address="local", num_cpus=_whole(cpus), num_gpus=gpus, include_dashboard=False,
                         object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(self._temp_dir), **quiet)
        except (RuntimeError, ConnectionError, OSError, ValueError) as error:
            self.close()
            place = f"join the Ray cluster at {address}" if address else "start Ray on this machine"
            raise LaunchError(f"cannot {place}: {error}") from error

    @property
    def own_address(self) -> str:
        """Of this machine, as the deployment's other nodes see it; loopback where there are none."""
        return "127.0.0.1" if self._temp_dir is not None else _node_address()

    @property
    def is_local(self) -> bool:
        """True: the whole deployment runs on this machine."""
        return self._temp_dir is not None

    def close(self) -> None:
        """Leave the cluster; end it, with every process and file of it, if it was started here."""
        import ray

        started = processes.descendants(os.getpid()) if self.is_local else ()
        if ray.is_initialized():
            ray.shutdown()
        if self._temp_dir is not None:
            processes.end(started, END_SECONDS)
            shutil.rmtree(self._temp_dir, ignore_errors=True)


class Opening:
    """A session that is being opened in a thread of its own, which nobody has to wait for should Ray hang.

    The thread stays until `over` is set: the kernel ends Ray's processes together with the thread that started them.
    """

    def __init__(self, address: str, deployment: str, cpus: float, gpus: int, on_open: Callable[[], None]) -> None:
        """`on_open` is called on the running event loop once it is open, or could not be opened."""
        self._loop = asyncio.get_running_loop()
        self._joins = bool(address)
        self.session: asyncio.Future[Session] = self._loop.create_future()
        self.session.add_done_callback(lambda _: on_open())
        self.over = threading.Event()
        opening = functools.partial(Session, address, deployment, cpus=cpus, gpus=gpus)
        threading.Thread(target=self._run, args=(opening,), name="ray session", daemon=True).start()

    async def opened(self, hurry: asyncio.Event) -> Session | None:
        """The session, if there is one: one that is still being opened has to be open before it can be closed.

        Only joining a cluster may hang, and what was not joined need not be left: `hurry` ends that wait.
        """
        hurried = asyncio.create_task(hurry.wait())
        waited: set[asyncio.Future[Any]] = {self.session} | ({hurried} if self._joins else set())
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not self.session.done() or self.session.exception() is not None:
            return None
        return self.session.result()

    def _run(self, opening: Callable[[], Session]) -> None:
        try:
            session = opening()
        except Exception as error:
            failure = error
            self._tell(lambda: self.session.set_exception(failure))
        else:
            self._tell(lambda: self.session.set_result(session))
        self.over.wait()

    def _tell(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waited
            self._loop.call_soon_threadsafe(lambda: None if self.session.cancelled() else action())


class Place:
    """Room that Ray keeps for one process, and the actor that holds the process of the moment.

    Every coroutine raises LaunchError when the actor, its node or the cluster is lost.
    """

    def __init__(self, member: Member, group: PlacementGroup, *, lifetime: str | None, host: Any = None, epoch: int = 0,
                 adopted: Mapping[str, Any] | None = None) -> None:
        self.member = member
        self.group = group
        self.epoch = epoch
        """Of the actor's process; 0 before the first one."""
        self.adopted = adopted
        """What Host.state said of a process that an earlier supervisor started."""
        self._lifetime = lifetime
        self._host = host

    def new_host(self) -> None:
        """Start an actor for the next epoch, in the background; one that was there is ended, and its process with it."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.kill()
        self.epoch += 1
        options = {
            "num_cpus": self.member.cpus, "num_gpus": self.member.gpus, "max_restarts": 0, "max_concurrency": 16,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0),
            "name": f"{self.member.name}/{self.epoch}", "lifetime": self._lifetime,
        }
        self._host = ray.remote(Host).options(**options).remote(self.member.name, self.member.identity)

    @property
    def log(self) -> str:
        """Folder of an adopted process's log."""
        return str(Path(self.adopted["log"]).parent) if self.adopted is not None else ""

    async def address(self) -> str:
        """Of the node, as other nodes see it."""
        return str(await self._result(self._host.address.remote()))

    async def start(self, arguments: Sequence[str], log_path: Path) -> None:
        """Start `python -m` with `arguments`."""
        member = self.member
        await self._result(self._host.start.remote(list(arguments), dict(member.env), member.gpus, str(log_path)))

    async def ready(self, timeout_seconds: float) -> dict[str, Any]:
        """The process's ready line; LaunchError also when it ends first, or is late."""
        fields: dict[str, Any] = await self._result(self._host.ready.remote(timeout_seconds))
        return fields

    async def wait(self) -> int:
        """The process's exit status, once it has ended."""
        host = self._host  # `kill` may come between two waits
        while (code := await self._result(host.wait.remote(WAIT_SECONDS))) is None:
            pass
        return int(code)

    async def tell(self, value: Any) -> None:
        """See ChildProcess.tell."""
        await self._result(self._host.tell.remote(value))

    async def end(self) -> None:
        """End the process at once; `wait` says so. An actor that does not answer is ended itself."""
        if (host := self._host) is None:
            return
        try:
            await asyncio.wait_for(self._result(host.end.remote()), ANSWER_SECONDS)
        except (TimeoutError, LaunchError):
            if self._host is host:  # else the next epoch has begun
                self.kill()

    async def stop(self, grace_seconds: float) -> int:
        """Drain and end the process; its exit status."""
        return int(await self._result(self._host.stop.remote(grace_seconds)))

    def kill(self) -> None:
        """End the actor at once; its process sees that and ends too."""
        import ray

        if self._host is not None:
            ray.kill(self._host)
            self._host = None

    def release(self) -> None:
        """Give the room back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)

    async def _result(self, reference: Awaitable[Any]) -> Any:
        import ray.exceptions

        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, SlipstreamError) else LaunchError(f"{self.member.name}: {error}")) from error
        except ray.exceptions.RayError as error:
            raise LaunchError(f"{self.member.name} lost its Ray actor: {type(error).__name__}") from error


def reserve(wanted: Sequence[Member], left: Mapping[str, Place], deployment: str, wait_seconds: float, *,
            lifetime: str | None) -> list[Place]:
    """One place per member, that of `left` or a new one, all of them or none; blocks for at most about `wait_seconds`.

    Raises PlacementError naming the first bundle that has no place and what each node lacks.
    """
    import ray
    from ray.util.placement_group import placement_group

    new = {one.name: Place(one, placement_group([one.bundle], strategy="STRICT_PACK", lifetime=lifetime,
                                                name=f"{prefix(deployment)}{one.name}/{secrets.token_hex(4)}"),
                           lifetime=lifetime) for one in wanted if one.name not in left}
    places = list(new.values())
    deadline = time.monotonic() + wait_seconds
    missing = [place for place in places if not place.group.wait(max(0.1, deadline - time.monotonic()))]
    if not missing:
        return [new.get(one.name) or left[one.name] for one in wanted]
    nodes = {str(node["NodeManagerAddress"]): dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    member = missing[0].member
    text = members.explain(member.name, member.bundle, nodes, ray.available_resources())
    for place in places:
        place.release()
    raise PlacementError(f"{text} (waited {wait_seconds:g} s; see ray.placement_seconds)")


def prefix(deployment: str) -> str:
    """What the names of a deployment's placement groups begin with."""
    return f"slipstream/{deployment}/"


class Host:
    """The actor beside every process: starts it on its node and waits for it. Methods run in threads of their own."""

    def __init__(self, name: str, identity: str) -> None:
        self._name = name
        self._identity = identity
        self._child: ChildProcess | None = None

    def address(self) -> str:
        """Of this node, as the other nodes see it."""
        return _node_address()

    def start(self, arguments: Sequence[str], env: Mapping[str, str], gpus: int, log_path: str) -> int:
        """Start `python -P -m` with `arguments` (-P: no module of the current folder is taken for ours); its pid."""
        import ray

        ids = [str(one) for one in ray.get_gpu_ids()] if gpus else []
        environment = members.child_environment(os.environ, env, ids)
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


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def gpus_here() -> int:
    """How many GPUs PyTorch can use on this machine. Asked in a process of its own: Ray's are forked from this one.

    Raises PlacementError when PyTorch cannot say.
    """
    command = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=GPU_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise PlacementError(f"PyTorch did not say within {GPU_SECONDS:g} s how many GPUs this machine has") from error
    if said.returncode:
        why = (said.stderr.strip().splitlines() or [f"it ended with {describe(said.returncode)}"])[-1]
        raise PlacementError(f"PyTorch cannot say how many GPUs this machine has: {why}")
    return int(said.stdout.split()[-1])


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes and cannot be interrupted."""
    if address != "auto":
        with socket.create_connection(split_address(address), timeout=CONNECT_SECONDS):
            pass


def _short_temp_dir() -> Path:
    parent, name = tempfile.gettempdir(), "slipstream-ray-"
    if len(parent) + len(name) + 9 > LONGEST_TEMP_PATH:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix=name, dir=parent))


def _whole(cpus: float) -> int:
    return max(1, -int(-cpus // 1))
