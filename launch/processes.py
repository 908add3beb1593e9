"""Processes of this machine as /proc shows them; knows not what they do."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """A process that was seen; `started` tells it from a later one with the same id."""

    pid: int
    parent: int
    started: int
    """Clock ticks after boot."""

    def is_running(self) -> bool:
        """False once it has ended, also while nobody has collected its status."""
        now = _read(self.pid)
        return now is not None and now.started == self.started


def descendants(pid: int) -> tuple[Process, ...]:
    """Children of `pid`, their children and so on."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (one := _read(int(entry))) is not None:
            children.setdefault(one.parent, []).append(one)
    found: list[Process] = []
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child.pid)
    return tuple(found)


def end(some: Iterable[Process], wait_seconds: float) -> None:
    """Wait until all of them have ended; those that have not after `wait_seconds` are killed."""
    deadline = time.monotonic() + wait_seconds
    left = [one for one in some if one.is_running()]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = [one for one in left if one.is_running()]
    for one in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one.pid, signal.SIGKILL)


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2:].split()  # the name before it may hold spaces and brackets
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), int(fields[19]))
