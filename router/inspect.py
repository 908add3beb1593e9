"""What workers say of their insides, for `GET /status?detail=1`. Knows no request."""

from __future__ import annotations

from typing import Any

from router.workers import WorkerLink
from slipstream.errors import UnavailableError

INSPECT_SECONDS = 2.0
"""Longest wait for one worker, such as for the end of a long step."""


async def inspect(link: WorkerLink) -> dict[str, Any]:
    """Its `kernels` and `holdings`, or why there are none: `inspect_problem`. Empty for a worker that is not connected."""
    if link.info is None:
        return {}
    try:
        reply = await link.inspect(INSPECT_SECONDS)
    except UnavailableError as error:
        return {"inspect_problem": error.message}
    return {
        "kernels": [{"op": one.op, "implementation": one.implementation, "reason": one.reason} for one in reply.kernels],
        "holdings": [{"owner": one.owner, "request_id": one.request_id, "blocks": one.blocks, "state_slots": one.state_slots}
                     for one in reply.holdings]}
