"""What the router knows of replicas, which of them fit together, and what is missing where none do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import UnavailableError
from slipstream.types import Role

MISFIT = "no prefill and decode replica fit together"


@dataclass(kw_only=True, slots=True)
class Replica:
    """What the router knows of a replica now: its link writes, policies read."""

    id: str
    """Its address."""
    role: Role
    compatibility_hash: str
    name: str = ""
    """Its replica id, for people."""
    block_size: int = 0
    dtype: str = ""
    channels: frozenset[str] = frozenset()
    """By which it can send or be sent a prompt's state; none: it does not tell."""
    host: str = ""
    """The machine that it runs on; empty: it does not tell."""
    max_running: int = 0
    total_blocks: int = 0
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    needs_snapshots: bool = False
    """It has recurrent states: what is cached of a prompt that it computes counts only up to a snapshot of them."""
    computes_prompts: bool = False
    """Of decode: it takes a prompt that nobody computed."""
    draining: bool = False
    waiting: int = 0
    """Requests, as the replica last said."""
    running: int = 0
    free_blocks: int = 0
    waiting_tokens: int = 0
    """Of prompts that are not computed yet, as the replica last said."""
    tokens_per_second: float = 0.0
    """Through its model while it works; 0: not known."""
    in_flight: int = 0
    """Requests of this router that the replica has and has not ended."""
    pending_tokens: int = 0
    """Of prompts that this router sent there to be computed, without what was thought to be cached; until they are."""

    @property
    def load(self) -> int:
        """Requests. What this router sent counts at once; what the replica said is a little old and includes other routers'."""
        told, sent = self.waiting + self.running, self.in_flight
        return told if told > sent else sent

    @property
    def queued_tokens(self) -> int:
        """Of prompts that are to be computed before a new one, by the same reasoning."""
        told, sent = self.waiting_tokens, self.pending_tokens
        return told if told > sent else sent

    def fits(self, other: Replica) -> bool:
        """True if a prompt's state can go from one to the other, as far as they tell."""
        return self.compatibility_hash == other.compatibility_hash and (
            not self.channels or not other.channels or not self.channels.isdisjoint(other.channels))


def missing(replicas: Sequence[Replica], *, local: bool = False) -> str:
    """Why no request could be served, or empty. `local`: decode computes prompts where no prefill replica is."""
    usable = [replica for replica in replicas if not replica.draining]
    if local and not any(replica.role is Role.PREFILL for replica in usable) and any(one.computes_prompts for one in usable):
        return ""
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
