"""How `slipstream explain` shows what a router keeps of one request. Knows no HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from launch.status import wide

DECIDED = "decided"
SCORE = {"cached tokens": "cached_tokens", "load": "load", "queue s": "queue_seconds", "compute s": "compute_seconds",
         "memory": "memory", "cost s": "cost_seconds"}
"""Columns, and what the router calls them."""


def show(fields: Mapping[str, Any], *, as_json: bool) -> None:
    """Print it: every decision with its candidates, and what happened between them."""
    console = wide()
    if as_json:
        console.print(json.dumps(dict(fields), indent=2), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(f"{fields['request_id']}: {fields['prompt_tokens']} prompt tokens", markup=False, highlight=False)
    for event in fields["events"]:
        console.print(f"{event['seconds']:9.4f} s  {_line(event)}", markup=False, highlight=False, soft_wrap=True)
        if event.get("candidates"):
            console.print(_candidates(event["candidates"]))
    if left_out := fields["left_out"]:
        console.print(f"{left_out} further events were not kept", markup=False, highlight=False)


def _line(event: Mapping[str, Any]) -> str:
    if event["event"] != DECIDED:
        facts = ", ".join(f"{name} {_cell(value)}" for name, value in event.items() if name not in ("seconds", "event"))
        return f"{event['event']}: {facts}"
    if event["prefill"] is None:
        where = f"{event['decode']} alone ({event['local']})"
    else:
        where = f"{event['prefill']} -> {event['decode']}"
    if event.get("load_from"):
        where += f" after a load of {event['load_tokens']} tokens from {event['load_from']}"
    return (f"{event['policy']}: {where}; {event['computed_tokens']} tokens to compute, transfer "
            f"{event['transfer_seconds']:.4f} s; {event['reason']}")


def _candidates(rows: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "replica", "role", *SCORE):
        table.add_column(name, justify="right" if name in SCORE else "left", no_wrap=True)
    for row in rows:
        table.add_row("*" if row["chosen"] else "", row["replica"], row["role"], *(_cell(row[key]) for key in SCORE.values()))
    return table


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
