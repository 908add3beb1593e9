"""One child process of a launcher: its start, its ready line, its log file and its end. Knows neither Ray nor any role."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.errors import LaunchError

TAIL_LINES = 8


class ChildProcess:
    """Starts `command` in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone.

    The child's stdin is a pipe that this object keeps: when the launching process ends in whatever way, the child sees
    the end of its stdin (`--exit-with-parent`). stderr, and stdout after the ready line, go to `log_path`.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = log_path.open("ab")
        self._ready: dict[str, Any] | None = None
        self._told = threading.Event()
        self._process = subprocess.Popen(
            list(command), env=dict(env), start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )
        self._reader = threading.Thread(target=self._read, name=f"stdout of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id, also the id of its session and process group."""
        return self._process.pid

    def ready(self, timeout_seconds: float) -> dict[str, Any]:
        """The fields of the ready line. Raises LaunchError, with the end of the log, if the child ends or is late."""
        deadline = time.monotonic() + timeout_seconds
        self._told.wait(timeout_seconds)
        if self._ready is not None:
            return self._ready
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(max(0.0, min(5.0, deadline - time.monotonic())))
            raise LaunchError(f"{self.name} ended with {describe(code)} before it was ready{self._tail()}")
        raise LaunchError(f"{self.name} was not ready after {timeout_seconds:.0f} s{self._tail()}")

    @property
    def serving(self) -> dict[str, Any] | None:
        """The fields of the ready line; None before it, and after the child's end."""
        return self._ready if self._process.poll() is None else None

    def tell(self, value: Any) -> None:
        """Write one line of JSON to the child's stdin; a child that has ended hears nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: `stop` has closed it
            os.write(self._process.stdin.fileno(), json.dumps(value).encode() + b"\n")

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Block until the child has ended; its exit status, negative for a signal; None if it goes on after the time."""
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(timeout=5)
        return code

    def stop(self, grace_seconds: float) -> int:
        """Ask the child to drain (SIGTERM), kill it after `grace_seconds`; its exit status."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
        code = self._process.wait()
        self.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()
        return code

    def kill(self) -> None:
        """End the child and its process group at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fields = _ready_fields(line)
            if fields is not None and self._ready is None:
                self._ready = fields
                self._told.set()
            else:
                with contextlib.suppress(ValueError):  # the log was closed by `stop`
                    self._log.write(line)
                    self._log.flush()
        self._process.stdout.close()
        self._told.set()

    def _tail(self) -> str:
        lines = tail(self.log_path)
        text = "\n  ".join(lines)
        return f"; the end of {self.log_path}:\n  {text}" if lines else f"; {self.log_path} is empty"


def describe(code: int) -> str:
    """An exit status in words: `status 3`, or `signal SIGKILL`."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"status {code}"


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log; of a JSON line only what it says."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    result = []
    for line in text.splitlines():
        record = _object(line)
        if record is None:
            result.append(line)
            continue
        result.append(str(record.get("message", line)))
        result.extend(str(record["exception"]).splitlines()[-1:] if record.get("exception") else [])
    return result[-lines:]


def _ready_fields(line: bytes) -> dict[str, Any] | None:
    record = _object(line)
    return record if record is not None and record.get("event") == "ready" else None


def _object(line: str | bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
