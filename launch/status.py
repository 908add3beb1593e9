"""How `slipstream status` shows what a router says of its deployment. Knows no HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

MIN_WIDTH = 120
"""A pipe has no width; a narrow terminal wraps lines rather than losing columns."""
LOAD = ("waiting", "running", "parked", "free_blocks", "free_state_slots")


def show(url: str, fields: Mapping[str, Any], problem: str, *, as_json: bool) -> None:
    """Print the router's `/status` fields; `problem` is why it takes no requests, or empty."""
    console = Console()
    console = Console(width=max(console.width, MIN_WIDTH))
    if as_json:
        console.print(json.dumps(dict(fields), indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(f"{url}: {problem or 'healthy'}", markup=False, highlight=False)
    console.print(_table(fields.get("replicas", ())))


def _table(replicas: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("replica", "role", "state", "epoch", "address", *LOAD):
        table.add_column(name.replace("_", " "), justify="right" if name in LOAD else "left", no_wrap=True)
    for one in replicas:
        load = one.get("load") or {}
        name = one.get("replica_id") or one.get("name") or "?"
        cells = [name, one.get("role", "?"), one.get("state", "?"), one.get("epoch", ""), one.get("address", "?")]
        table.add_row(*(str(cell) for cell in [*cells, *(load.get(key, "") for key in LOAD)]))
    return table
