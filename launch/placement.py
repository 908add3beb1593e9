"""Where processes run: a Ray session, and per process a placement group and an actor that holds it. Knows no role's logic."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch import members, processes
from launch.child import ChildProcess
from slipstream.errors import LaunchError, PlacementError

LONGEST_TEMP_PATH = 40
"""Ray puts sockets below its folder, and a socket's path may have 107 bytes."""
OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: no bytes of ours travel through its object store."""
END_SECONDS = 10.0


class Session:
    """A connection to Ray. Without an address a cluster is started on this machine, and only that one is ever ended."""

    def __init__(self, address: str, *, cpus: float, gpus: int) -> None:
        """Blocks for some seconds. Raises LaunchError if no cluster answers at `address`, or none can be started."""
        self._temp_dir: Path | None = None
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # masks are set in `child_environment`
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        try:
            if address:
                ray.init(address=address, **quiet)
            else:
                self._temp_dir = _short_temp_dir()
                ray.init(address="local", num_cpus=_whole(cpus), num_gpus=gpus, include_dashboard=False,
                         object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(self._temp_dir), **quiet)
        except (RuntimeError, ConnectionError, OSError, ValueError) as error:
            self.close()
            place = f"join the Ray cluster at {address}" if address else "start Ray on this machine"
            raise LaunchError(f"cannot {place}: {error}") from error

    @property
    def is_local(self) -> bool:
        """True: everything runs on this machine, and loopback addresses will do."""
        return self._temp_dir is not None

    def close(self) -> None:
        """Leave the cluster; end it, with every process and file of it, if it was started here."""
        started = processes.descendants(os.getpid()) if self.is_local else ()
        if ray.is_initialized():
            ray.shutdown()
        if self._temp_dir is not None:
            processes.end(started, END_SECONDS)
            shutil.rmtree(self._temp_dir, ignore_errors=True)


def _short_temp_dir() -> Path:
    parent = tempfile.gettempdir()
    name = "slipstream-ray-"
    if len(parent) + len(name) + 9 > LONGEST_TEMP_PATH:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix=name, dir=parent))


def _whole(cpus: float) -> int:
    return max(1, -int(-cpus // 1))


class Host:
    """The actor beside every process: starts it on its node and waits for it. Methods run in threads of their own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._child: ChildProcess | None = None

    def address(self) -> str:
        """Of this node, as the other nodes see it."""
        return str(ray.util.get_node_ip_address())

    def start(self, arguments: Sequence[str], env: Mapping[str, str], gpus: int, log_path: str) -> int:
        """Start `python -P -m` with `arguments` (-P: no module of the current folder is taken for ours); its pid."""
        ids = [str(one) for one in ray.get_gpu_ids()] if gpus else []
        environment = members.child_environment(os.environ, env, ids)
        command = [sys.executable, "-P", "-m", *arguments]
        self._child = ChildProcess(self._name, command, environment, Path(log_path))
        return self._child.pid

    def ready(self, timeout_seconds: float) -> dict[str, Any]:
        """See ChildProcess.ready."""
        return self._started().ready(timeout_seconds)

    def wait(self) -> int:
        """Exit status, once the process has ended."""
        return self._started().wait()

    def stop(self, grace_seconds: float) -> int:
        """Drain and end the process; its exit status."""
        return self._started().stop(grace_seconds)

    def _started(self) -> ChildProcess:
        assert self._child is not None, "start comes first"
        return self._child


@dataclass(frozen=True, kw_only=True)
class Place:
    """Room that Ray keeps for one process, over restarts of it."""

    member: members.Member
    group: PlacementGroup

    def host(self) -> Any:
        """A new Host actor in this place (its creation goes on in the background)."""
        options = {
            "num_cpus": self.member.cpus, "num_gpus": self.member.gpus, "max_restarts": 0, "max_concurrency": 8,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0),
        }
        return ray.remote(Host).options(**options).remote(self.member.name)

    def release(self) -> None:
        """Give the room back; an actor that is still there is ended."""
        remove_placement_group(self.group)


def reserve(wanted: Sequence[members.Member], deployment: str, wait_seconds: float) -> list[Place]:
    """One place per member, all of them or none; blocks for at most about `wait_seconds`.

    Raises PlacementError naming the first bundle that has no place and what each node lacks.
    """
    places = [Place(member=one, group=placement_group([one.bundle], strategy="STRICT_PACK", name=f"{deployment}/{one.name}"))
              for one in wanted]
    deadline = time.monotonic() + wait_seconds
    missing = [place for place in places if not place.group.wait(max(0.1, deadline - time.monotonic()))]
    if not missing:
        return places
    for place in places:
        place.release()
    nodes = {str(node["NodeManagerAddress"]): dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
    member = missing[0].member
    text = members.explain(member.name, member.bundle, nodes, ray.available_resources())
    raise PlacementError(f"{text} (waited {wait_seconds:g} s; see ray.placement_seconds)")


def own_address() -> str:
    """This node's address, as the other nodes see it."""
    return str(ray.util.get_node_ip_address())
