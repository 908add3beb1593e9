"""How `slipstream status` shows what a router says of its deployment. Knows no HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

MIN_WIDTH = 120
"""A narrow terminal wraps lines rather than losing columns."""
NO_LIMIT = 1 << 16
KERNELS = ("op", "implementation", "reason")
LEDGER = ("owner", "request_id", "blocks", "state_slots")
NUMBERS = ("blocks", "state_slots")
LOAD = ("waiting", "running", "parked", "free_blocks", "free_state_slots")


def show(url: str, fields: Mapping[str, Any], problem: str, *, as_json: bool, kernels: bool = False,
         ledger: bool = False) -> None:
    """Print the router's `/status` fields; `problem` is why it takes no requests, or empty. `kernels`, `ledger`: these tables
    too, of what `/status?detail=1` says."""
    console = wide()
    if as_json:
        console.print(json.dumps(dict(fields), indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    at = f"; gRPC at {fields['grpc']}" if fields.get("grpc") else ""
    console.print(f"{url}: {problem or 'healthy'}{at}", markup=False, highlight=False)
    replicas = fields.get("replicas", ())
    console.print(_table(replicas))
    for wanted, key, columns in ((kernels, "kernels", KERNELS), (ledger, "holdings", LEDGER)):
        if wanted:
            console.print()
            console.print(_detail(replicas, key, columns))
    for one in replicas:
        if why := one.get("problem") or one.get("inspect_problem"):
            console.print(f"{one.get('replica_id') or one.get('address')}: {why}", markup=False, highlight=False)


def wide(least: int = MIN_WIDTH) -> Console:
    """At least so many columns; nothing is cut or wrapped where no terminal has a width."""
    console = Console()
    return Console(width=max(console.width, least) if console.is_terminal else NO_LIMIT)


def _table(replicas: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("replica", "role", "state", "epoch", "address", *LOAD):
        table.add_column(name.replace("_", " "), justify="right" if name in LOAD else "left", no_wrap=True)
    for one in replicas:
        load = one.get("load") or {}
        name = one.get("replica_id") or one.get("name") or "?"
        cells = [name, one.get("role", "?"), one.get("state", "?"), one.get("epoch", ""), one.get("address", "")]
        table.add_row(*(str(cell) for cell in [*cells, *(load.get(key, "") for key in LOAD)]))
    return table


def _detail(replicas: Any, key: str, columns: tuple[str, ...]) -> Table:
    """The rows under `key` of every replica; replicas that say the same share theirs."""
    table = Table(box=None, pad_edge=False)
    for name in ("replica", *columns):
        table.add_column(name.replace("_", " "), justify="right" if name in NUMBERS else "left",
                         no_wrap=name not in ("replica", "reason"))
    groups: list[tuple[list[str], list[Mapping[str, Any]]]] = []
    for one in replicas:
        rows = one.get(key) or []
        same = next((names for names, known in groups if known == rows), None)
        if same is not None:
            same.append(str(one.get("replica_id")))
        elif rows:
            groups.append(([str(one.get("replica_id"))], rows))
    for names, rows in groups:
        for number, row in enumerate(rows):
            table.add_row("" if number else ", ".join(names), *(str(row.get(name, "")) for name in columns))
    return table
