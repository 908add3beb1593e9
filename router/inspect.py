"""What workers say of their insides, for `GET /status?detail=...`. Knows no request."""

from __future__ import annotations

from typing import Any

from router.link import WorkerLink
from slipstream.errors import UnavailableError

INSPECT_SECONDS = 2.0
"""Longest wait for one worker, such as for the end of a long step."""


DETAILS = ("1", "transfers")
"""Everything, or transfers alone, for which no worker waits for its engine."""
TRANSFER = ("request_id", "transfer_id", "attempt", "side", "rank", "peer", "peer_rank", "channel", "phase", "age_seconds",
            "kv_bytes", "state_bytes")


async def inspect(link: WorkerLink, detail: str) -> dict[str, Any]:
    """Its `transfers` and, of DETAILS "1", its `kernels` and `holdings`, or why there are none: `inspect_problem`. Empty for
    a worker that is not connected."""
    if link.info is None:
        return {}
    try:
        reply = await link.inspect(INSPECT_SECONDS, only_transfers=detail == "transfers")
    except UnavailableError as error:
        return {"inspect_problem": error.message}
    moving = {"transfers": [{**{name: getattr(one, name) for name in TRANSFER},
                             "total_bytes": one.total_bytes if one.HasField("total_bytes") else None}
                            for one in reply.transfers], "silent_ranks": list(reply.silent_ranks)}
    if detail == "transfers":
        return moving
    return {
        **moving,
        "kernels": [{"op": one.op, "implementation": one.implementation, "reason": one.reason} for one in reply.kernels],
        "holdings": [{"owner": one.owner, "request_id": one.request_id, "blocks": one.blocks, "state_slots": one.state_slots}
                     for one in reply.holdings]}
