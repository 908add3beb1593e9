"""Writes requests to files, prompts and outputs included, so that they can be reproduced; off unless `debug.record_dir` is set.

A process owns two files, `NAME-N.jsonl` and the older `NAME-N.jsonl.1`, N being the first that no other process has, so that a
restart goes on where it left off. Together they stay within a bound; the oldest lines go first. Knows no request.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

logger = logging.getLogger(__name__)

PROCESSES = 1000
"""More than a host runs of one kind."""


class Recorder:
    """One process's record. Writing never raises: the first failure is logged and ends the recording."""

    def __init__(self, folder: Path, name: str, limit_bytes: int) -> None:
        """Raises ConfigError for a folder that cannot be written to."""
        self._half = limit_bytes // 2
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path, self._lock = _claim(folder, name)
            self._file = _open(self.path)
        except OSError as error:
            raise ConfigError(f"cannot record requests in {folder}: {error.strerror}; choose another debug.record_dir, or "
                              "an empty one to record nothing", field="debug.record_dir") from error
        logger.warning("PROMPTS AND OUTPUTS OF ALL REQUESTS ARE RECORDED in %s, up to %d bytes; unset debug.record_dir to stop",
                       self.path, limit_bytes)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one JSON line. One longer than half the bound is left out, and the log says so."""
        if self._file < 0:
            return
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        if len(line) > self._half:
            logger.warning("a request of %d bytes is too long to be recorded; raise debug.record_bytes", len(line))
            return
        try:
            if os.fstat(self._file).st_size + len(line) > self._half:
                os.close(self._file)
                self._file = -1
                self.path.replace(f"{self.path}.1")
                self._file = _open(self.path)
            os.write(self._file, line)
        except OSError as error:
            logger.error("recording has ended: %s", error)
            self.close()

    def close(self) -> None:
        """Write no more."""
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1


def _claim(folder: Path, name: str) -> tuple[Path, int]:
    """The first record of this name that no living process has, and its lock, which ends with the process."""
    for number in range(PROCESSES):
        lock = os.open(folder / f"{name}-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return folder / f"{name}-{number}.jsonl", lock
    raise OSError(None, f"{PROCESSES} processes record there already")


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
