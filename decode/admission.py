"""Decides whether a prompt may land here now, and when a refused one should ask again. Pure; knows no pool and no clock.

Memory for a prompt and the beginning of its output is taken before its first byte comes. A refused request keeps its place:
until it comes back, smaller ones are let in only if they leave what it needs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from slipstream.types import EngineLoad

CLAIM_SECONDS = 2.0
"""How long a refused request keeps its place; it may have gone to another replica."""
MIN_RETRY_SECONDS = 0.02
MAX_RETRY_SECONDS = 1.0
REMEMBERED_ENDS = 16


@dataclass(frozen=True, kw_only=True)
class Busy:
    """Why a prompt may not land now."""

    reason: str
    retry_after_seconds: float


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a request starts with."""

    blocks: int
    slots: int = 1
    """State slots, as many for each choice; they count only for a model that has any."""


@dataclass(frozen=True, kw_only=True)
class _Claim:
    need: Need
    refused_at: float


class Admission:
    """The line of refused requests. Every `now` is in seconds of the same clock."""

    def __init__(self) -> None:
        self._line: OrderedDict[str, _Claim] = OrderedDict()  # in the order of their first refusal
        self._holding: set[str] = set()
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)

    def ask(self, name: str, need: Need, load: EngineLoad, now: float) -> Busy | None:
        """None: request `name` may try to take what it needs."""
        self._expire(now)
        head = next(iter(self._line), None)
        if head is None or head == name:
            return None
        first = self._line[head].need
        left_blocks = load.free_blocks - need.blocks
        left_slots = load.free_state_slots - need.slots
        if left_blocks >= first.blocks and (not load.total_state_slots or left_slots >= first.slots):
            return None
        return self._refuse(name, need, now, f"{len(self._line)} requests wait for memory on this replica")

    def refused(self, name: str, need: Need, load: EngineLoad, now: float) -> Busy:
        """The pools could not serve request `name`."""
        self._expire(now)
        if load.total_state_slots and load.free_state_slots < need.slots:
            reason = (f"{need.slots} state slots are needed, {load.free_state_slots} of {load.total_state_slots} are free on "
                      "this replica")
        elif need.blocks > load.free_blocks:
            reason = f"{need.blocks} blocks are needed, {load.free_blocks} of {load.total_blocks} are free on this replica"
        else:
            reason = (f"{load.running} sequences run on this replica: that is its limit, or what is free is kept for their "
                      "growth")
        return self._refuse(name, need, now, reason)

    def admitted(self, name: str) -> None:
        """The request has its memory: it waits no more."""
        self._line.pop(name, None)
        self._holding.add(name)

    def ended(self, name: str, now: float) -> None:
        """The request is over; if it held memory, that is back."""
        if name in self._holding:
            self._holding.remove(name)
            self._ends.append(now)

    def _refuse(self, name: str, need: Need, now: float, reason: str) -> Busy:
        self._line[name] = _Claim(need=need, refused_at=now)  # a name that is in the line keeps its place
        place = 1 + list(self._line).index(name)
        seconds = min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, place * self._interval(now)))
        return Busy(reason=reason, retry_after_seconds=seconds)

    def _interval(self, now: float) -> float:
        """Seconds from one end to the next, by the last ones."""
        if len(self._ends) < 2:
            return 2 * MIN_RETRY_SECONDS
        return (now - self._ends[0]) / len(self._ends)

    def _expire(self, now: float) -> None:
        for name in [name for name, claim in self._line.items() if now - claim.refused_at > CLAIM_SECONDS]:
            del self._line[name]
