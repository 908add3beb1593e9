"""Blocks and state slots: one owner each, and every move that the ledger contradicts is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.block_pool import BlockPool
from slipstream.engine.ledger import Ledger, Owner, OwnerKind
from slipstream.engine.state_pool import StatePool
from slipstream.errors import InternalError
from slipstream.types import RequestId


def owner(name: str, kind: OwnerKind = OwnerKind.SEQUENCE) -> Owner:
    return Owner(kind=kind, request=RequestId(name=name))


def test_blocks_cover_tokens_rounded_up() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_too_few_blocks_changes_nothing() -> None:
    pool = BlockPool(4, 16)
    assert pool.take(3, owner("a")) is not None
    assert pool.take(2, owner("b")) is None
    assert pool.free == 1
    pool.check_integrity()


def test_double_free_foreign_free_and_use_of_freed_are_refused() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.take(2, owner("a"))
    assert blocks is not None
    with pytest.raises(InternalError, match="belongs to sequence a"):
        pool.give_back(blocks, owner("b"))
    with pytest.raises(InternalError, match="twice"):
        pool.give_back((blocks[0], blocks[0]), owner("a"))
    pool.check_write(blocks, 0, 32, owner("a"))
    pool.give_back(blocks, owner("a"))
    with pytest.raises(InternalError, match="free list"):
        pool.give_back(blocks, owner("a"))
    with pytest.raises(InternalError, match="free list"):
        pool.check_write(blocks, 17, 1, owner("a"))
    with pytest.raises(InternalError, match="there are 4"):
        pool.give_back((4,), owner("a"))
    assert pool.free == 4
    pool.check_integrity()


def test_a_write_is_checked_against_the_blocks_that_it_touches() -> None:
    pool = BlockPool(4, 16)
    mine, other = pool.take(1, owner("a")), pool.take(1, owner("b"))
    assert mine
    assert other
    pool.check_write(mine + other, 0, 16, owner("a"))
    with pytest.raises(InternalError):
        pool.check_write(mine + other, 15, 2, owner("a"))


def test_reassignment_needs_the_present_owner() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.take(2, owner("a"))
    assert blocks is not None
    transfer = owner("a", OwnerKind.TRANSFER)
    pool.reassign(blocks, owner("a"), transfer)
    with pytest.raises(InternalError, match="transfer a"):
        pool.give_back(blocks, owner("a"))
    with pytest.raises(InternalError):
        pool.reassign(blocks, owner("a"), transfer)
    pool.give_back(blocks, transfer)
    assert pool.owned() == {}


def test_state_slots_run_out_and_come_back() -> None:
    pool = StatePool(2)
    first, second = pool.take(owner("a")), pool.take(owner("b"))
    assert first is not None
    assert second is not None
    assert {*first, *second} == {0, 1}
    assert pool.take(owner("c")) is None
    with pytest.raises(InternalError):
        pool.give_back(first, owner("b"))
    pool.give_back(first, owner("a"))
    with pytest.raises(InternalError):
        pool.check_owner(first, owner("a"))
    assert pool.take(owner("c")) == first
    pool.check_integrity()


def test_a_pool_without_slots_is_legal() -> None:
    assert StatePool(0).take(owner("a")) is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5)), max_size=40))
def test_units_are_conserved(moves: list[tuple[str, int]]) -> None:
    """Taking under a name that holds units returns them first: at each moment free + held is the total, nothing is shared."""
    ledger = Ledger(12, "unit")
    held: dict[str, tuple[int, ...]] = {}
    for name, count in moves:
        if name in held:
            ledger.give_back(held.pop(name), owner(name))
        units = ledger.take(count, owner(name))
        if units is not None:
            held[name] = units
        everything = [unit for units in held.values() for unit in units]
        assert len(set(everything)) == len(everything) == ledger.total - ledger.free
        assert ledger.owned() == {unit: owner(name) for name, units in held.items() for unit in units}
        ledger.check_integrity()
