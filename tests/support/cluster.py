"""Starts real worker and router processes without Ray, on free ports, and ends them; keeps their logs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.child import ChildProcess

READY_SECONDS = 90.0
STOP_SECONDS = 20.0


@dataclass(kw_only=True)
class Running:
    """One process."""

    name: str
    address: str
    """`host:port` of a worker's gRPC server or of a router's HTTP server."""
    pid: int
    child: ChildProcess
    metrics: str = ""
    """`host:port` of a worker's metrics."""
    grpc: str = ""
    """`host:port` of a router's gRPC API."""

    def log(self) -> list[dict[str, Any]]:
        """Its JSON log lines so far."""
        lines = self.child.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def complaints(self) -> list[str]:
        """What it logged as an error or worse."""
        return [f"{self.name}: {line['message']} {line.get('exception', '')}" for line in self.log()
                if line.get("level") in ("error", "critical")]


def free_port() -> int:
    """A port of this machine's loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Cluster:
    """Processes of one test module; `start` several names at once to load them side by side."""

    def __init__(self, folder: Path, log_level: str = "info") -> None:
        self._folder = folder
        self._log_level = log_level
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self.processes: dict[str, Running] = {}
        self._killed: set[str] = set()
        self._count: Counter[str] = Counter()

    def start_workers(self, *roles: str, overrides: Sequence[str] = (), epoch: int = 1) -> list[Running]:
        """Start replicas of these roles (`prefill`, `decode`) together; they are named `prefill-0`, `prefill-1` and so on."""
        return self.start_each(*((role, overrides) for role in roles), epoch=epoch)

    def start_each(self, *wanted: tuple[str, Sequence[str]], epoch: int = 1, listen: str = "127.0.0.1:0",
                   advertise: str = "") -> list[Running]:
        """The same for (role, overrides) pairs."""
        started: list[tuple[str, ChildProcess]] = []
        for role, overrides in wanted:
            name = f"{role}-{self._count[role]}"
            self._count[role] += 1
            settings = [part for override in overrides for part in ("--set", override)]
            arguments = [role, *settings, "--replica-id", name, "--epoch", str(epoch), "--listen", listen,
                         "--advertise", advertise]
            started.append((name, self._spawn(name, arguments)))
        return [self._ready(name, child, "address") for name, child in started]

    def start_gang(self, role: str, tp: int, pp: int, overrides: Sequence[str] = (), epoch: int = 1) -> list[Running]:
        """One replica of `tp * pp` ranks, as `NAME/RANK`; rank 0 is the replica."""
        name = f"{role}-{self._count[role]}"
        self._count[role] += 1
        pool = [f"pools.{role}.role={role}", f"pools.{role}.tp={tp}", f"pools.{role}.pp={pp}"]
        settings = [part for override in (*pool, *overrides) for part in ("--set", override)]
        master = f"127.0.0.1:{free_port()}"
        children = [self._spawn(f"{name}-{rank}", [
            role, *settings, "--replica-id", name, "--epoch", str(epoch), "--listen", "127.0.0.1:0", "--rank", str(rank),
            "--world", str(tp * pp), "--master", master]) for rank in range(tp * pp)]
        return [self._ready(f"{name}/{rank}" if rank else name, child, "address") for rank, child in enumerate(children)]

    def start_router(self, workers: Sequence[Running], overrides: Sequence[str] = ()) -> Running:
        """Start a router in front of these workers."""
        settings = [part for override in ("router.port=0", *overrides) for part in ("--set", override)]
        known = [part for worker in workers for part in ("--worker", worker.address)]
        name = f"router-{self._count['router']}"
        self._count["router"] += 1
        return self._ready(name, self._spawn(name, ["router", *settings, *known]), "http")

    def kill(self, running: Running) -> None:
        """SIGKILL."""
        self._killed.add(running.name)
        os.kill(running.pid, signal.SIGKILL)
        running.child.wait()

    def forget(self, running: Running) -> None:
        """It has ended by itself."""
        assert running.child.wait(0) is not None, f"{running.name} still runs"
        self._killed.add(running.name)

    def stop(self, running: Running) -> int:
        """SIGTERM; the exit status."""
        self.processes.pop(running.name)
        return running.child.stop(STOP_SECONDS)

    def close(self) -> dict[str, int]:
        """End all processes; the exit statuses of those that were not killed."""
        left = [running for running in self.processes.values() if running.name not in self._killed]
        with ThreadPoolExecutor(max_workers=max(1, len(left))) as pool:
            codes = pool.map(lambda running: running.child.stop(STOP_SECONDS), left)
            return dict(zip((running.name for running in left), codes, strict=True))

    def _spawn(self, name: str, arguments: Sequence[str]) -> ChildProcess:
        command = [sys.executable, "-m", *arguments, "--exit-with-parent", "--log-level", self._log_level]
        return ChildProcess(name, command, self._env, self._folder / f"{name}-{time.monotonic_ns()}.log")

    def _ready(self, name: str, child: ChildProcess, key: str) -> Running:
        line = child.ready(READY_SECONDS)
        running = self.processes[name] = Running(name=name, address=line[key], pid=line["pid"], child=child,
                                                 metrics=line.get("metrics", ""), grpc=line.get("grpc", ""))
        return running
