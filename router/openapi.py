"""The OpenAPI document of the HTTP surface: openapi.json beside this file, written by hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import slipstream


@cache
def document() -> dict[str, Any]:
    """With this version's number."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("openapi.json").read_text())
    found["info"]["version"] = slipstream.__version__
    return found
