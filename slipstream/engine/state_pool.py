"""The slots for conv and recurrent states and who owns them; knows no tensor. A model without such states has 0 slots."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.engine.ledger import Ledger, Owner


class StatePool:
    """Slots `first` to `first + total - 1`. A slot is not cleared when it is freed: a prompt's first chunk starts from
    zeros."""

    def __init__(self, total: int, first: int = 0) -> None:
        self._first = first
        self._ledger = Ledger(total, "state slot")

    @property
    def total(self) -> int:
        """Slots that exist."""
        return self._ledger.total

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return self._ledger.free

    def take(self, owner: Owner, count: int = 1) -> tuple[int, ...] | None:
        """`count` slots for `owner`, or None if fewer are free."""
        units = self._ledger.take(count, owner)
        return None if units is None else tuple(self._first + unit for unit in units)

    def give_back(self, slots: Iterable[int], owner: Owner) -> None:
        """Return `slots` of `owner`. Raises InternalError on a double or foreign free."""
        self._ledger.give_back([slot - self._first for slot in slots], owner)

    def reassign(self, slots: Iterable[int], old: Owner, new: Owner) -> None:
        """Hand `slots` from `old` to `new`."""
        self._ledger.reassign([slot - self._first for slot in slots], old, new)

    def check_owner(self, slots: Iterable[int], owner: Owner) -> None:
        """Raise InternalError unless `owner` owns all of `slots`."""
        self._ledger.check_owner([slot - self._first for slot in slots], owner)

    def owned(self) -> dict[int, Owner]:
        """Every slot that is not free, with its owner."""
        return {self._first + slot: owner for slot, owner in self._ledger.owned().items()}

    def check_integrity(self) -> None:
        """Raise InternalError unless every slot has exactly one owner."""
        self._ledger.check_integrity()
