"""Runs the `slipstream` command as a user does, and finds whatever it might leave behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMAND = str(Path(sys.executable).parent / "slipstream")


class Command:
    """One run of `slipstream`, in a session and with a temporary folder of its own."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None) -> None:
        # Short: Ray puts sockets below it.
        self.folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
        self._process = subprocess.Popen([COMMAND, *arguments], text=True, cwd=cwd,
                                         env=os.environ | {"TMPDIR": str(self.folder)} | dict(env or {}),
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        self.lines: list[str] = []
        self._grew = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def text(self) -> str:
        """Everything printed so far."""
        with self._grew:
            return "".join(self.lines)

    def wait_for(self, pattern: str, timeout_seconds: float = 100.0) -> re.Match[str]:
        """The first match in what is printed; fails when the command ends without it."""
        deadline = time.monotonic() + timeout_seconds
        with self._grew:
            while True:
                if match := re.search(pattern, "".join(self.lines)):
                    return match
                assert self._reader.is_alive(), f"ended without {pattern!r}:\n{''.join(self.lines)}"
                assert time.monotonic() < deadline, f"no {pattern!r} in time:\n{''.join(self.lines)}"
                self._grew.wait(0.2)

    def signal(self, number: signal.Signals) -> None:
        """Signal the command alone, as `kill` does."""
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float = 100.0) -> int:
        """Exit status; what was printed is complete then."""
        status = self._process.wait(timeout_seconds)
        self._reader.join(20)
        return status

    def leftovers(self) -> list[str]:
        """Processes of this run that are still there, and files of ours or of Ray in its temporary folder."""
        files = [str(path) for path in self.folder.iterdir() if not path.name.startswith("torchinductor_")]
        return self.processes() + files

    def processes(self) -> list[str]:
        """`pid command line` of what is still there."""
        return [f"{pid} {_line(pid)}" for pid in self._processes()]

    def clean_up(self) -> None:
        """End whatever is left, by its process id; for the end of a test, whatever became of it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pid in self._processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._grew:
                self.lines.append(line)
                self._grew.notify_all()

    def _processes(self) -> list[int]:
        """By session, or by the temporary folder in the environment: whoever leaves the session still inherits that."""
        marker = f"TMPDIR={self.folder}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue
            if fields[0] not in "ZX" and (int(fields[3]) == self.pid or marker in environment):
                found.append(int(entry))
        return found


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "(ended)"
