"""What the `__main__` of every process does alike: arguments, logging, the ready line, stop signals. Knows no role.

A process announces itself with one JSON line on stdout when it serves, logs to stderr, drains on the first SIGTERM or
SIGINT and then exits 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path

from slipstream import config as config_module
from slipstream.config import Config
from slipstream.observability import logs


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The arguments that every process shares."""
    result = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    result.add_argument("--config", type=Path, help="TOML configuration file")
    result.add_argument("--config-json", help="the whole configuration as JSON (how the supervisor passes it)")
    result.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one configuration value")
    result.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return result


def start(arguments: argparse.Namespace, process: str) -> Config:
    """Set up logging and read the configuration. Raises ConfigError."""
    logs.configure(process, arguments.log_level)
    if arguments.config_json:
        return config_module.from_dict(json.loads(arguments.config_json))
    return config_module.load(arguments.config, arguments.set)


def announce(**fields: object) -> None:
    """Print the ready line: `{"event": "ready", ...}`."""
    print(json.dumps({"event": "ready", **fields}), flush=True)


def stop_event() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second one ends the process at once with status 130."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if event.is_set():
            sys.stderr.flush()
            raise SystemExit(130)
        event.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)
    return event
