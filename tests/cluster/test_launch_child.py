"""Child processes: ready line, log, end, and that none outlives its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import processes
from launch.child import ChildProcess, describe, tail
from slipstream.errors import LaunchError

READY = """
import sys
from slipstream import process
arguments = process.parser("stub", "").parse_args(["--exit-with-parent"])
process.start(arguments, "stub")
import os, signal, threading
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
process.announce(address="127.0.0.1:1", pid=os.getpid())
print("after", flush=True)
print("complaint", file=sys.stderr, flush=True)
asked.wait()
sys.exit(STATUS)
"""

LAUNCHER = """
import os, sys
from pathlib import Path
from launch.child import ChildProcess
child = ChildProcess("stub", [sys.executable, "-c", sys.argv[1]], os.environ, Path(sys.argv[2]))
child.ready(30)
print(child.pid, flush=True)
sys.stdin.read()
"""


def child(code: str, log: Path) -> ChildProcess:
    return ChildProcess("stub-0", [sys.executable, "-c", code], dict(os.environ), log)


def gone(pid: int, wait_seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_ready_stop_and_log(tmp_path: Path) -> None:
    one = child(READY.replace("STATUS", "0"), tmp_path / "logs" / "stub.log")
    assert one.ready(30) == {"event": "ready", "address": "127.0.0.1:1", "pid": one.pid}
    assert os.getsid(one.pid) == one.pid != os.getsid(0)
    assert one.stop(10) == 0
    assert one.wait() == 0
    assert sorted((tmp_path / "logs" / "stub.log").read_text().split()) == ["after", "complaint"]


def test_an_end_before_ready_shows_the_end_of_the_log(tmp_path: Path) -> None:
    code = """import sys; print('{"level": "error", "message": "port 8000 is taken"}', file=sys.stderr); sys.exit(3)"""
    one = child(code, tmp_path / "stub.log")
    with pytest.raises(LaunchError, match=r"stub-0 ended with status 3 before it was ready; the end of .*log:\n  port 8000 is"):
        one.ready(30)
    one.stop(1)


def test_late_is_not_ready(tmp_path: Path) -> None:
    one = child("import sys; sys.stdin.read()", tmp_path / "stub.log")
    with pytest.raises(LaunchError, match=r"stub-0 was not ready after 0 s; .*stub\.log is empty"):
        one.ready(0.1)
    one.stop(0)


def test_one_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    code = """import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"event": "ready"}', flush=True)
sys.stdin.read()"""
    one = child(code, tmp_path / "stub.log")
    one.ready(30)
    assert one.stop(0.1) == -signal.SIGKILL


def test_a_child_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    code = READY.replace("STATUS", "0")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, code, str(tmp_path / "stub.log")], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    assert not gone(pid, 0)
    launcher.kill()
    launcher.communicate()
    assert gone(pid)


def test_descendants_and_their_end() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); sys.stdin.read()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    seen = [one for one in processes.descendants(os.getpid()) if one.pid in (parent.pid, grandchild)]
    assert {(one.pid, one.parent) for one in seen} == {(parent.pid, os.getpid()), (grandchild, parent.pid)}
    processes.end(seen, 0.1)
    parent.communicate()
    assert gone(grandchild)
    assert not any(one.is_running() for one in seen)


def test_statuses_in_words(tmp_path: Path) -> None:
    assert (describe(3), describe(-9)) == ("status 3", "signal SIGKILL")
    assert tail(tmp_path / "missing.log") == []
