"""Which process of which machine an address means: what one process can reach of another, and when that has died."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.errors import ProtocolError


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process, for ever: a pid that is used again has another start."""

    boot: str
    """Of the kernel: equal on one machine until it restarts."""
    pid_namespace: int
    """Pids mean the same only within one."""
    pid: int
    start: int
    """Clock ticks after boot."""

    @classmethod
    def here(cls) -> Process:
        """This process."""
        return cls(boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
                   pid_namespace=os.stat("/proc/self/ns/pid").st_ino, pid=os.getpid(), start=_start(os.getpid()) or 0)

    @classmethod
    def unpack(cls, data: bytes) -> Process:
        """From `pack`. Raises ProtocolError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{len(data)} bytes that name no process: {error}") from error

    def pack(self) -> bytes:
        """For an address."""
        return msgspec.msgpack.encode(self)

    def beside(self, other: Process) -> bool:
        """True if each can name the other by its pid."""
        return (self.boot, self.pid_namespace) == (other.boot, other.pid_namespace)

    @property
    def alive(self) -> bool:
        """Of a process beside this one; a zombie, whose memory is gone, is not."""
        return _start(self.pid) == self.start


def _start(pid: int) -> int | None:
    """When a process began; None: there is none that runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets
    return None if fields[0] in "ZX" else int(fields[19])
