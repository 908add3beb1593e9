"""What `slipstream transfers` shows: the streams that replicas tell of, joined to one line a transfer. Knows no HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from launch.status import MIN_WIDTH, wide

PHASES = "opened", "begun", "ready", "sending", "moving", "moved", "quarantined"
"""A transfer is where the slowest of its streams is, but quarantined if one of them is."""
REST_WIDTH = 64
"""What the columns beside the request id need at least, on several lines."""
UNITS = "B", "KiB", "MiB", "GiB", "TiB"


def joined(replicas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry a transfer, the oldest first, from the router's `/status?detail=transfers`.

    Most streams are told of by both ends; the destination's account is taken then, since what it counts has landed.
    `total_bytes` is None until every stream knows its own.
    """
    found: dict[tuple[str, int, str, str], dict[tuple[int, int], dict[str, dict[str, Any]]]] = {}
    for replica in replicas:
        for one in replica.get("transfers", ()):
            here, there = (replica["replica_id"], one["rank"]), (one["peer"], one["peer_rank"])
            (prefill, sender), (decode, receiver) = (here, there) if one["side"] == "send" else (there, here)
            streams = found.setdefault((one["transfer_id"], one["attempt"], prefill, decode), {})
            streams.setdefault((sender, receiver), {})[one["side"]] = {**one, "prefill_rank": sender, "decode_rank": receiver}
    return sorted((_entry(*key, [_stream(streams[pair]) for pair in sorted(streams)]) for key, streams in found.items()),
                  key=lambda entry: -float(entry["age_seconds"]))


def _stream(ends: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By what its ends tell: while the destination waits for the first bytes, the source may be sending them."""
    if "receive" not in ends:
        return ends["send"]
    sending = ends["receive"]["phase"] == "ready" and ends.get("send", {}).get("phase") in ("moving", "moved")
    return {**ends["receive"], "phase": "sending"} if sending else ends["receive"]


def _entry(transfer_id: str, attempt: int, prefill: str, decode: str, streams: list[dict[str, Any]]) -> dict[str, Any]:
    phases = sorted({one["phase"] for one in streams}, key=PHASES.index)
    totals = [one["total_bytes"] for one in streams]
    return {
        "request_id": streams[0]["request_id"], "transfer_id": transfer_id, "attempt": attempt, "prefill": prefill,
        "decode": decode, "channel": ", ".join(sorted({one["channel"] for one in streams} - {""})),
        "phase": phases[-1] if phases[-1] == "quarantined" else phases[0],
        "bytes": sum(one["kv_bytes"] + one["state_bytes"] for one in streams),
        "total_bytes": None if None in totals else sum(totals), "age_seconds": max(one["age_seconds"] for one in streams),
        "streams": [{name: value for name, value in one.items() if name not in ("rank", "peer", "peer_rank")}
                    for one in streams]}


def problems(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who does not tell, and why: what is shown may lack theirs."""
    return [f"{one.get('replica_id') or one.get('address')}: {problem}" for one in replicas
            for problem in (one.get("inspect_problem") or one.get("problem"), *one.get("silent_ranks", ())) if problem]


def show(fields: Mapping[str, Any], *, as_json: bool) -> None:
    """Print them."""
    transfers, silent = joined(fields.get("replicas", ())), problems(fields.get("replicas", ()))
    console = wide(max([MIN_WIDTH, *(len(one["request_id"]) + REST_WIDTH for one in transfers)]))
    if as_json:
        said = json.dumps({"transfers": transfers, "problems": silent}, indent=2)
        console.print(said, markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("request id", "from -> to", "channel", "streams", "phase", "bytes", "age"):
        table.add_column(name, justify="right" if name in ("streams", "bytes", "age") else "left",
                         no_wrap=name in ("request id", "phase"), overflow="fold")
    for one in transfers:
        total = "?" if one["total_bytes"] is None else _size(one["total_bytes"])
        table.add_row(one["request_id"], f"{one['prefill']} -> {one['decode']}", one["channel"] or "?",
                      str(len(one["streams"])), one["phase"], f"{_size(one['bytes'])} of {total}",
                      f"{one['age_seconds']:.1f} s")
    console.print(table if transfers else "no transfer is in flight", markup=False, highlight=False)
    for line in silent:
        console.print(line, markup=False, highlight=False)


def _size(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {UNITS[unit]}" if unit else f"{count:.0f} B"
