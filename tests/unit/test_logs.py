"""Log lines: one JSON object each, with the request's id, bounded, and never a dump of a value."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import torch

from slipstream.observability import logs
from slipstream.observability.logs import MAX_CHARACTERS, JsonFormatter


def line(message: str, *args: object, extra: dict[str, Any] | None = None, error: Exception | None = None) -> dict[str, Any]:
    told = None if error is None else (type(error), error, None)
    record = logging.getLogger("test").makeRecord("test", logging.INFO, __file__, 1, message, args, told, extra=extra)
    text = JsonFormatter("decode-0").format(record)
    assert "\n" not in text
    result: dict[str, Any] = json.loads(text)
    return result


def test_a_line_has_its_place_and_its_request() -> None:
    token = logs.request_id.set("req-1")
    try:
        got = line("moved %d blocks\nof %s", 3, "x", extra={"seconds": 0.5})
    finally:
        logs.request_id.reset(token)
    assert got.pop("time").endswith("Z")
    assert got == {"level": "info", "process": "decode-0", "logger": "test", "message": "moved 3 blocks\nof x",
                   "request_id": "req-1", "seconds": 0.5}
    assert "request_id" not in line("no request")
    assert line("told", extra={"request_id": "req-2"})["request_id"] == "req-2"


def test_tensors_are_named_not_dumped() -> None:
    got = line("a step", extra={"logits": torch.full((2, 2), 7.25), "pixels": np.full(3, 7.25), "error": ValueError("7.25")})
    assert (got["logits"], got["pixels"], got["error"]) == ("<Tensor>", "<ndarray>", "<ValueError>")
    assert "7.25" not in json.dumps(got)


def test_lines_are_bounded() -> None:
    got = line("%s", "a" * 10_000, error=ValueError("b" * 10_000 + "the end"))
    assert len(got["message"]) < MAX_CHARACTERS + 50
    assert got["message"].endswith("(6000 more characters)")
    assert len(got["exception"]) == MAX_CHARACTERS
    assert got["exception"].endswith("the end")
