"""A connection to Ray, joined or started here, and what a machine has. Knows no process of ours.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch import processes
from launch.child import describe
from slipstream.errors import LaunchError, PlacementError
from slipstream.rpc.server import split_address

LONGEST_TEMP_PATH = 40
"""Ray puts sockets below its folder, and a socket's path may have 107 bytes."""
OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: no bytes of ours travel through its object store."""
MANY_CPUS = 1024.0
"""What a cluster that is started here offers if nothing limits it: they are only counted."""
END_SECONDS = 10.0
CONNECT_SECONDS = 5.0
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
            hint, known = "", {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
            if address and not known and not isinstance(error, ConnectionRefusedError):
                hint = ("; if the cluster asks for a token, as Ray does by default, set RAY_AUTH_TOKEN or "
                        "RAY_AUTH_TOKEN_PATH here as on its nodes")
            raise LaunchError(f"cannot {place}: {error}{hint}") from error

    @property
    def own_address(self) -> str:
        """Of this machine, as the deployment's other nodes see it; loopback where there are none."""
        return "127.0.0.1" if self._temp_dir is not None else node_address()

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


def node_address() -> str:
    """Of this machine, as the other nodes of the cluster see it."""
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
