"""What the `__main__` of every process does alike: arguments, logging, the ready line, stop signals. Knows no role.

A process announces itself with one JSON line on stdout when it serves, logs to stderr, drains on the first SIGTERM or
SIGINT and then exits 0. A process whose launcher holds its stdin (`--exit-with-parent`) does not outlive the launcher, which
can tell it something by a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream import config as config_module
from slipstream.config import Config
from slipstream.observability import logs

ORPHAN_SECONDS = 2.0
"""How long a process that lost its launcher may take to end in order."""
SAME_PRESS_SECONDS = 0.3
"""Two signals closer than this are one wish: a terminal, or `timeout`, may signal both a process and its group."""


_listeners: list[Callable[[Any], object]] = []


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The arguments that every process shares."""
    result = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    result.add_argument("--config", type=Path, help="TOML configuration file")
    result.add_argument("--config-json", help="the whole configuration as JSON (how the supervisor passes it)")
    result.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one configuration value")
    result.add_argument("--exit-with-parent", action="store_true",
                        help="end when stdin ends: a launcher keeps the other end of the pipe")
    result.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return result


def start(arguments: argparse.Namespace, process: str) -> Config:
    """Set up logging and read the configuration. Raises ConfigError."""
    logs.configure(process, arguments.log_level)
    if arguments.exit_with_parent:
        threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    if arguments.config_json:
        return config_module.from_dict(json.loads(arguments.config_json))
    return config_module.load(arguments.config, arguments.set)


def _watch_parent() -> None:
    """A pipe rather than PR_SET_PDEATHSIG: it works from any thread of the launcher and cannot be missed before we look."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        for line in stdin:
            with contextlib.suppress(ValueError, RuntimeError):  # no JSON; the loop has ended
                fields = json.loads(line)
                for listener in _listeners:
                    listener(fields)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def announce(**fields: object) -> None:
    """Print the ready line: `{"event": "ready", ...}`."""
    print(json.dumps({"event": "ready", **fields}), flush=True)


def on_control(action: Callable[[Any], object]) -> None:
    """From now on call `action` on the running event loop with the value of every line that the launcher writes to stdin."""
    loop = asyncio.get_running_loop()
    _listeners.append(lambda value: loop.call_soon_threadsafe(action, value))


def stop_event() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second one ends the process at once with status 130."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    first = 0.0

    def on_signal() -> None:
        nonlocal first
        if not event.is_set():
            first = time.monotonic()
            event.set()
        elif time.monotonic() - first > SAME_PRESS_SECONDS:
            sys.stderr.flush()
            raise SystemExit(130)

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)
    return event
