"""Which prefill and which decode replica serve a request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slipstream.errors import UnavailableError
from slipstream.types import Role

MISFIT = "no prefill and decode replica fit together"


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What the router knows of a replica now."""

    id: str
    role: Role
    compatibility_hash: str
    block_size: int = 0
    dtype: str = ""
    channels: frozenset[str] = frozenset()
    """By which it can send or be sent a prompt's state; none: it does not tell."""
    draining: bool = False
    waiting: int = 0
    """Requests, as the replica last said."""
    running: int = 0
    free_blocks: int = 0
    in_flight: int = 0
    """Requests of this router that the replica has and has not ended."""

    def fits(self, other: Replica) -> bool:
        """True if a prompt's state can go from one to the other, as far as they tell."""
        return self.compatibility_hash == other.compatibility_hash and (
            not self.channels or not other.channels or not self.channels.isdisjoint(other.channels))


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
    prefills, decodes = ([one for one in usable if one.role is role] for role in (Role.PREFILL, Role.DECODE))
    return "" if any(p.fits(d) for p in prefills for d in decodes) else f"{MISFIT}: {_misfit(prefills, decodes)}"


def _misfit(prefills: Sequence[Replica], decodes: Sequence[Replica]) -> str:
    """What keeps every pair apart, with the values of both sides."""
    def values(key: str) -> list[str]:
        return [", ".join(sorted({str(getattr(one, key)) for one in side})) for side in (prefills, decodes)]

    if any(p.compatibility_hash == d.compatibility_hash for p in prefills for d in decodes):
        here, there = (" or ".join(sorted({", ".join(sorted(one.channels)) for one in side})) for side in (prefills, decodes))
        return (f"prefill offers the channels {here}, decode {there}; set transfer.channel and transfer.rdma.engine to the "
                "same on both sides")
    for key, name in (("block_size", "engine.block_size"), ("dtype", "model.dtype")):
        if not {getattr(one, key) for one in prefills} & {getattr(one, key) for one in decodes}:
            here, there = values(key)
            return f"{name} is {here} at prefill and {there} at decode; set it to the same on both sides"
    here, there = values("compatibility_hash")
    return (f"their compatibility hashes differ, {here} at prefill and {there} at decode; serve the same weights with the same "
            "release, engine.block_size and model.dtype on both sides")


def refusal(reason: str) -> UnavailableError:
    """The answer to a request for which something is `missing`: a misfit lasts until somebody mends it, all else passes."""
    if reason.startswith(MISFIT):
        return UnavailableError(reason, retry_after_seconds=60.0)
    return UnavailableError(f"{reason}; try again soon", retry_after_seconds=1.0)


def choose(replicas: Sequence[Replica], *, turn: int, not_now: Collection[str] = ()) -> Pair:
    """The least loaded pair that fits together, without replicas of `not_now` as far as there are others; `turn`
    breaks ties in rotation.

    Raises UnavailableError saying what is missing.
    """
    for role in Role:
        others = [replica for replica in replicas if replica.role is not role or replica.id not in not_now]
        if not missing(others):
            replicas = others
    if reason := missing(replicas):
        raise refusal(reason)
    usable = [replica for replica in replicas if not replica.draining]
    decodes = [replica for replica in usable if replica.role is Role.DECODE]
    prefill = _least([one for one in usable if one.role is Role.PREFILL and any(map(one.fits, decodes))], turn)
    return Pair(prefill=prefill, decode=_least([one for one in decodes if prefill.fits(one)], turn))


def another_decode(replicas: Sequence[Replica], prefill: Replica, *, not_now: Collection[str], turn: int) -> Replica:
    """Where to go on when a decode replica was busy: somebody else if there is, else the same one again."""
    fitting = [replica for replica in replicas if not replica.draining and replica.role is Role.DECODE
               and prefill.fits(replica)]
    if not fitting:
        raise UnavailableError("no decode replica is left that could continue the request", retry_after_seconds=1.0)
    others = [replica for replica in fitting if replica.id not in not_now]
    return _least(others or fitting, turn)


def _least(fitting: Sequence[Replica], turn: int) -> Replica:
    start = turn % len(fitting)
    rotated = [*fitting[start:], *fitting[:start]]
    # What this router sent counts at once; what the replica reported is a little old and includes other routers' requests.
    return min(rotated, key=lambda replica: (max(replica.in_flight, replica.waiting + replica.running), -replica.free_blocks))
