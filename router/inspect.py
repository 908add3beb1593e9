"""What `GET /status` says of workers, and of their insides. Knows no request."""

from __future__ import annotations

from typing import Any

from router.link import WorkerLink
from slipstream.errors import UnavailableError
from slipstream.rpc import convert

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


def describe(link: WorkerLink) -> dict[str, Any]:
    """What is known of a worker without asking it."""
    info, load, view = link.info, link.load, link.view()
    if info is None or view is None:
        row: dict[str, Any] = {"replica_id": "", "role": "?", "state": "disconnected", "address": link.address,
                               "problem": link.problem}
        if last := link.last_info:
            row |= {"replica_id": last.replica_id, "role": convert.role_from_pb(last.role).value, "epoch": last.epoch}
        return row
    return {
        "replica_id": info.replica_id, "role": view.role.value, "state": "draining" if link.draining else "ready",
        "address": link.address, "epoch": info.epoch, "pid": info.pid, "model": info.model_name, "dtype": info.dtype,
        "device": info.device, "version": info.version, "compatibility_hash": info.compatibility_hash,
        "channels": list(info.channels),
        "metrics_address": info.metrics_address, "total_blocks": info.total_blocks, "total_state_slots": info.total_state_slots,
        "load": {"waiting": load.waiting, "running": load.running, "parked": load.parked, "free_blocks": load.free_blocks,
                 "free_state_slots": load.free_state_slots}}
