"""A process with a write engine and one buffer, driven by lines of JSON: what each end of a one-sided write does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cache_transfer.channels.engines import choose_engine
from cache_transfer.channels.engines.base import Engine, Write
from cache_transfer.channels.engines.environment import set_environment
from cache_transfer.spans import Spans
from slipstream.errors import SlipstreamError

HOST = "127.0.0.1"
SENTINEL = 0xEE


class Peer:
    """The test's end: starts the process and calls its commands."""

    def __init__(self, engine: str, process: str, size: int, env: Mapping[str, str] | None = None) -> None:
        arguments = json.dumps({"engine": engine, "process": process, "size": size})
        self._child = subprocess.Popen([sys.executable, "-m", "tests.support.write_peer", arguments], text=True,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | dict(env or {}))
        self.pid = self._child.pid
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, f"the peer ended with {self._child.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer of a command. Raises RuntimeError with the code and text of what it failed of."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._child.stdin.flush()
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def listens_at(self) -> set[str]:
        """Hosts of the TCP sockets on which it accepts connections, as the kernel's tables write them."""
        ours = {os.readlink(fd) for fd in Path(f"/proc/{self.pid}/fd").iterdir() if fd.exists() or fd.is_symlink()}
        tables = [Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table]
        return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in ours}

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def leave(self) -> int:
        """Let it end as Python processes do, engine closed; its status."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        return self._child.wait(20)


class Commands:
    """The process's end."""

    def __init__(self, engine: str, process: str, size: int) -> None:
        self._made = (engine, process)
        self.buffer = np.zeros(size, np.uint8)
        self.start = int(self.buffer.ctypes.data)
        self.writes: list[Write] = []
        self.engine = self._new()

    def _new(self) -> Engine:
        engine = choose_engine(self._made[0], host=HOST, process=self._made[1])
        engine.register(np.array([[self.start, self.buffer.nbytes]], np.uint64))
        return engine

    def address(self) -> str:
        return self.engine.address().hex()

    def memory(self) -> int:
        return self.start

    def fill(self, seed: int) -> None:
        self.buffer[:] = np.random.default_rng(seed).integers(0, 256, self.buffer.nbytes, dtype=np.uint8)

    def sentinel(self) -> None:
        self.buffer[:] = SENTINEL

    def changed(self) -> int:
        """Bytes that are not the sentinel."""
        return int(np.count_nonzero(self.buffer != SENTINEL))

    def read(self, at: int, size: int) -> str:
        return self.buffer[at : at + size].tobytes().hex()

    def connect(self, address: str) -> str:
        return self.engine.connect(bytes.fromhex(address))

    def write(self, peer: str, local: list[list[int]], remote: list[list[int]]) -> int:
        """`local` from the start of the buffer, `remote` as addresses."""
        mine: Spans = np.array(local, np.uint64) + np.array([self.start, 0], np.uint64)
        self.writes.append(self.engine.write(peer, mine, np.array(remote, np.uint64)))
        return len(self.writes) - 1

    def flood(self, peer: str, to: int, times: int) -> int:
        """The whole buffer in spans of 256 KiB, over and over, in one write."""
        at = np.arange(0, self.buffer.nbytes, 1 << 18, dtype=np.uint64)
        spans = np.tile(np.stack([at, np.full_like(at, 1 << 18)], 1), (times, 1))
        self.writes.append(self.engine.write(peer, spans + np.array([self.start, 0], np.uint64),
                                             spans + np.array([to, 0], np.uint64)))
        return len(self.writes) - 1

    def poll(self, write: int, seconds: float) -> list[Any]:
        """Whether it is over by then; how long that took; the longest poll."""
        began, longest = time.monotonic(), 0.0
        while True:
            before = time.monotonic()
            over = self.writes[write].poll()
            longest = max(longest, time.monotonic() - before)
            if over or time.monotonic() - began > seconds:
                return [over, time.monotonic() - began, longest]
            time.sleep(0.0005)

    def await_landing(self) -> int:
        """Until the first byte that is not the sentinel."""
        while self.buffer[0] == SENTINEL:
            time.sleep(0.0001)
        return self.changed()

    def close(self) -> None:
        self.engine.close()
        self.engine.close()

    def renew(self) -> None:
        """What a restart does, in one process."""
        self.engine.close()
        self.engine = self._new()

    def held(self) -> list[int]:
        """File descriptors and threads."""
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()]

    def idle(self, seconds: float) -> float:
        """CPU seconds per second that the process takes while nothing happens."""
        before = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / seconds


def main() -> None:
    set_environment(os.environ, HOST)
    commands = Commands(**json.loads(sys.argv[1]))
    print("{}", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        try:
            answer = {"value": getattr(commands, wanted.pop("command"))(**wanted)}
        except SlipstreamError as error:
            answer = {"error": f"{error.code}: {error.message}"}
        print(json.dumps(answer), flush=True)
    commands.engine.close()


if __name__ == "__main__":
    main()
