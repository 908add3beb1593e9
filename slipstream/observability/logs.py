"""JSON log lines on stderr; every line carries the process and, inside a request, its id. Never a prompt or a token value."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

MAX_CHARACTERS = 4000
"""Of a message; of an exception, from its end."""

request_id: ContextVar[str] = ContextVar("request_id", default="")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, process, logger, message, request_id, then what `extra` gave."""

    _standard = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _head(record.getMessage()),
        }
        if current := request_id.get():
            line["request_id"] = current
        line.update({key: value for key, value in vars(record).items()
                     if key not in self._standard and not key.startswith("_")})  # "_": another library's own
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-MAX_CHARACTERS:]
        return json.dumps(line, ensure_ascii=False, default=_kind)


def _head(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text) - MAX_CHARACTERS} more characters)"


def _kind(value: object) -> str:
    """What stands in a line for a value that JSON cannot say: a tensor or a message is named, never dumped."""
    return f"<{type(value).__name__}>"


def configure(process: str, level: str = "info") -> None:
    """Called once by each process's main: the root logger writes JSON lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
