"""Which prefill and which decode replica serve a request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slipstream.errors import UnavailableError
from slipstream.types import Role


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What the router knows of a replica now."""

    id: str
    role: Role
    compatibility_hash: str
    draining: bool = False
    waiting: int = 0
    """Requests, as the replica last said."""
    running: int = 0
    free_blocks: int = 0
    in_flight: int = 0
    """Requests of this router that the replica has and has not ended."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Who computes the prompt and who continues it."""

    prefill: Replica
    decode: Replica


def missing(replicas: Sequence[Replica]) -> str:
    """Why no request could be served, or empty."""
    usable = [replica for replica in replicas if not replica.draining]
    absent = [role.value for role in Role if not any(replica.role is role for replica in usable)]
    if absent:
        return f"no {' and no '.join(absent)} replica is connected"
    prefills = {replica.compatibility_hash for replica in usable if replica.role is Role.PREFILL}
    if not any(replica.role is Role.DECODE and replica.compatibility_hash in prefills for replica in usable):
        return "no prefill and decode replica have the same compatibility hash; do they serve the same model and block size?"
    return ""


def choose(replicas: Sequence[Replica], *, turn: int, not_now: Collection[str] = ()) -> Pair:
    """The least loaded pair of equal compatibility hash, without replicas of `not_now` as far as there are others; `turn`
    breaks ties in rotation.

    Raises UnavailableError saying what is missing.
    """
    for role in Role:
        others = [replica for replica in replicas if replica.role is not role or replica.id not in not_now]
        if not missing(others):
            replicas = others
    if reason := missing(replicas):
        raise UnavailableError(f"{reason}; try again soon", retry_after_seconds=1.0)
    usable = [replica for replica in replicas if not replica.draining]
    decode_hashes = {replica.compatibility_hash for replica in usable if replica.role is Role.DECODE}
    prefill = _least(usable, Role.PREFILL, decode_hashes, turn)
    return Pair(prefill=prefill, decode=_least(usable, Role.DECODE, {prefill.compatibility_hash}, turn))


def another_decode(replicas: Sequence[Replica], compatibility_hash: str, *, not_now: Collection[str], turn: int) -> Replica:
    """Where to go on when a decode replica was busy: somebody else if there is, else the same one again."""
    fitting = [replica for replica in replicas if not replica.draining and replica.role is Role.DECODE
               and replica.compatibility_hash == compatibility_hash]
    if not fitting:
        raise UnavailableError("no decode replica is left that could continue the request", retry_after_seconds=1.0)
    others = [replica for replica in fitting if replica.id not in not_now]
    return _least(others or fitting, Role.DECODE, {compatibility_hash}, turn)


def _least(replicas: Sequence[Replica], role: Role, hashes: Collection[str], turn: int) -> Replica:
    fitting = [replica for replica in replicas if replica.role is role and replica.compatibility_hash in hashes]
    start = turn % len(fitting)
    rotated = fitting[start:] + fitting[:start]
    # What this router sent counts at once; what the replica reported is a little old and includes other routers' requests.
    return min(rotated, key=lambda replica: (max(replica.in_flight, replica.waiting + replica.running), -replica.free_blocks))
