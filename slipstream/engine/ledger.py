"""Who owns each numbered unit (a block, a state slot) of a pool; knows neither what a unit holds nor how big it is."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.errors import InternalError
from slipstream.types import RequestId


class OwnerKind(enum.Enum):
    """What may own a unit beside the free list."""

    SEQUENCE = "sequence"
    """Being computed or decoded here."""
    RESERVATION = "reservation"
    """Waiting for bytes from a prefill replica, which may write into it at any time."""
    TRANSFER = "transfer"
    """Being read by a transfer to a decode replica."""
    CACHE = "cache"
    """Never written again; any number of sequences may read it."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Exactly one of these, or the free list, owns a unit."""

    kind: OwnerKind
    request: RequestId | None = None
    """None for the cache."""
    choice: int = 0

    def __str__(self) -> str:
        if self.request is None:
            return f"the {self.kind.value}"
        return f"{self.kind.value} {self.request}" + (f" choice {self.choice}" if self.choice else "")


class Ledger:
    """Units 0 to total - 1, each either free or owned once. A move that the ledger contradicts raises InternalError."""

    def __init__(self, total: int, noun: str) -> None:
        self._noun = noun
        self._owners: list[Owner | None] = [None] * total
        self._free = list(range(total - 1, -1, -1))  # a stack: the unit freed last is warm in the cache, so it goes out first

    @property
    def total(self) -> int:
        """Units that exist."""
        return len(self._owners)

    @property
    def free(self) -> int:
        """Units that nobody owns."""
        return len(self._free)

    def take(self, count: int, owner: Owner) -> tuple[int, ...] | None:
        """Give `count` free units to `owner`; None, and nothing changes, if there are not enough."""
        if count > len(self._free):
            return None
        units = tuple(self._free.pop() for _ in range(count))
        for unit in units:
            self._owners[unit] = owner
        return units

    def give_back(self, units: Iterable[int], owner: Owner) -> None:
        """Return `units` of `owner` to the free list. Raises InternalError on a double or a foreign free."""
        units = tuple(units)
        self.check_owner(units, owner)
        if len(set(units)) != len(units):
            raise InternalError(f"{owner} frees a {self._noun} twice in one call: {units}")
        for unit in reversed(units):
            self._owners[unit] = None
            self._free.append(unit)

    def reassign(self, units: Iterable[int], old: Owner, new: Owner) -> None:
        """Move `units` from `old` to `new` without passing the free list."""
        units = tuple(units)
        self.check_owner(units, old)
        for unit in units:
            self._owners[unit] = new

    def check_owner(self, units: Iterable[int], owner: Owner) -> None:
        """Raise InternalError unless `owner` owns every one of `units` (asked before each write into them)."""
        for unit in units:
            if not 0 <= unit < len(self._owners):
                raise InternalError(f"{owner} names {self._noun} {unit}; there are {len(self._owners)}")
            actual = self._owners[unit]
            if actual is not owner and actual != owner:
                raise InternalError(f"{owner} uses {self._noun} {unit}, which belongs to {actual or 'the free list'}")

    def owned(self) -> dict[int, Owner]:
        """Every unit that is not free, with its owner."""
        return {unit: owner for unit, owner in enumerate(self._owners) if owner is not None}

    def check_integrity(self) -> None:
        """Raise InternalError unless every unit is exactly once free or owned."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InternalError(f"a {self._noun} is on the free list twice")
        for unit, owner in enumerate(self._owners):
            if (owner is None) != (unit in free):
                raise InternalError(f"{self._noun} {unit} of {owner} is {'on' if unit in free else 'off'} the free list")
