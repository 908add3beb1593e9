"""Two processes that move bytes from one to the other; stopped by a signal while another pair is measured. Knows no method."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness import Sample
from bench.pool import LAYERS, Job
from slipstream.errors import TransferError

ROOT = Path(__file__).parent.parent


class Pair:
    """A context manager: leaving it ends both."""

    def __init__(self, blocks: int, env: Mapping[str, str] | None = None, layers: int = LAYERS) -> None:
        """`blocks`, `layers`: of each side's pool."""
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **(env or {})}
        self._sides = [subprocess.Popen(
            [sys.executable, "-m", "bench.side", role, str(blocks), str(layers)], cwd=ROOT, env=quiet, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE) for role in ("source", "destination")]
        self._moves = 0

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._sides:
            side.kill()
            side.wait()

    def open(self, name: str, way: str, transfer: Mapping[str, Any]) -> None:
        """Make both halves of a mover. Raises TransferError."""
        source = self._ask(0, open=name, way=way, transfer=transfer)
        self._pid = source["pid"]
        self._ask(1, open=name, way=way, transfer=transfer, address=source["address"])

    def move(self, name: str, job: Job) -> Sample:
        """Move a job, and look at every block of it. Raises TransferError also for wrong bytes."""
        self._moves += 1
        which = {"job": (job.blocks, job.shuffled, job.pool, job.layers), "id": f"{name} {self._moves}"}
        self._ask(0, offer=name, **which)
        moved = self._ask(1, move=name, source_pid=self._pid, **which)
        if moved["wrong"]:
            raise TransferError(f"{name}: {moved['wrong']} blocks arrived wrong")
        return Sample(bytes=job.bytes, seconds=moved["seconds"], cpu_seconds=moved["cpu_seconds"])

    def pause(self) -> None:
        """Not a thread of theirs runs."""
        for side in self._sides:
            side.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on."""
        for side in self._sides:
            side.send_signal(signal.SIGCONT)

    def _ask(self, side: int, **command: Any) -> dict[str, Any]:
        process = self._sides[side]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline() or '{"error": "the process ended"}')
        if "error" in answer:
            raise TransferError(f"{command}: {answer['error']}")
        return answer
