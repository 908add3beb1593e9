"""The prefix cache: what it finds, what it never gives away, what goes first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.block_hash import PictureRows, prompt_keys
from slipstream.cache_keys import short
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.ledger import Owner, OwnerKind
from slipstream.engine.prefix_cache import PrefixCache
from slipstream.engine.state_pool import StatePool
from slipstream.errors import InternalError
from slipstream.types import RequestId


def owner(name: str) -> Owner:
    return Owner(kind=OwnerKind.SEQUENCE, request=RequestId(name=name))


def make(blocks: int = 8, snapshots: int = 2, *, enabled: bool = True) -> PrefixCache:
    return PrefixCache(BlockPool(blocks, 4), StatePool(snapshots, first=10), enabled=enabled)


def shared(cache: PrefixCache, keys: list[bytes], name: str = "a") -> tuple[int, ...]:
    """Blocks of a sequence that has computed these keys."""
    blocks = cache.take(len(keys), owner(name))
    assert blocks is not None
    for block, key in zip(blocks, keys, strict=True):
        cache.share(block, key, owner(name))
    return blocks


# Keys ----------------------------------------------------------------------------------------------------------------


def test_keys_name_everything_before_and_nothing_after() -> None:
    keys = prompt_keys(range(10), 4)
    assert len(keys) == 2, "a partial block has no key"
    assert prompt_keys([*range(8), 99, 98, 97, 96], 4)[:2] == keys
    assert prompt_keys([7, *range(1, 10)], 4)[1] != keys[1], "the first token counts in every key"
    assert prompt_keys(range(10), 4, salt="tenant")[0] != keys[0]
    assert prompt_keys(range(10), 5)[0] != keys[0]


def test_keys_are_the_same_in_every_version() -> None:
    assert [key.hex() for key in prompt_keys(range(8), 4, salt="s")] == [
        "320d84b67f38ce8573ae416838776a67", "96a4b00cc6f9f5daa84543abcbd0fc2e"]


def test_keys_name_the_pictures_in_their_blocks() -> None:
    def keys(*contents: bytes, start: int = 3) -> list[bytes]:
        pictures = [PictureRows(start=start + 6 * i, count=4, content_hash=content) for i, content in enumerate(contents)]
        return prompt_keys([5] * 20, 4, pictures=pictures)

    red, blue = b"r" * 16, b"b" * 16
    assert keys(red, blue) == keys(red, blue)
    differ = [ours != theirs for ours, theirs in zip(keys(red, blue), keys(red, red), strict=True)]
    assert differ == [False, False, True, True, True], "from the block on that holds the first of its rows"
    assert keys(red)[0] != keys(red, start=2)[0], "where a picture lies counts"


# Blocks --------------------------------------------------------------------------------------------------------------


def test_what_was_shared_is_found_as_far_as_it_goes() -> None:
    cache, keys = make(), prompt_keys(range(16), 4)
    blocks = shared(cache, keys[:3])
    assert cache.match(keys, needs_state=False).blocks == blocks
    assert cache.match(prompt_keys(range(1, 9), 4), needs_state=False).blocks == ()


def test_pinned_blocks_stay_and_idle_ones_go_deepest_first() -> None:
    cache, keys = make(blocks=4), prompt_keys(range(16), 4)
    blocks = shared(cache, keys)
    assert cache.available == 0
    assert cache.take(1, owner("b")) is None
    cache.unpin(blocks)
    assert cache.available == 4
    assert cache.take(2, owner("b")) is not None
    assert cache.match(keys, needs_state=False).blocks == blocks[:2]
    assert cache.evicted == 2
    cache.check_integrity({})


def test_the_least_recently_used_prompt_goes_first() -> None:
    cache = make(blocks=4)
    old, new = prompt_keys(range(8), 4), prompt_keys(range(50, 58), 4)
    of_old, of_new = shared(cache, old), shared(cache, new, "b")
    cache.unpin(of_old)
    cache.unpin(of_new)
    cache.pin(of_old)
    cache.unpin(of_old)
    assert cache.take(2, owner("c")) is not None
    assert cache.match(old, needs_state=False).blocks == of_old
    assert cache.match(new, needs_state=False).blocks == ()


def test_a_second_block_of_the_same_content_is_shared_without_being_found() -> None:
    cache, keys = make(), prompt_keys(range(4), 4)
    first, second = shared(cache, keys), shared(cache, keys, "b")
    assert cache.match(keys, needs_state=False).blocks == first
    cache.unpin(second)
    assert cache.available == 7, "nobody could find it: it is free at once"
    cache.unpin(first)
    cache.check_integrity({})
    assert len(cache) == 1


def test_a_block_that_others_read_cannot_be_written_or_freed() -> None:
    pool = BlockPool(2, 4)
    cache = PrefixCache(pool, StatePool(0))
    blocks = shared(cache, prompt_keys(range(4), 4))
    with pytest.raises(InternalError, match="belongs to the cache"):
        pool.check_write(blocks, 0, 1, owner("a"))
    with pytest.raises(InternalError, match="belongs to the cache"):
        pool.give_back(blocks, owner("a"))
    cache.unpin(blocks)
    with pytest.raises(InternalError, match="more often"):
        cache.unpin(blocks)


def test_switched_off_it_keeps_nothing() -> None:
    cache, keys = make(enabled=False), prompt_keys(range(8), 4)
    blocks = shared(cache, keys)
    assert cache.match(keys, needs_state=False).blocks == ()
    assert cache.snapshot_slot(keys[0]) is None
    cache.unpin(blocks)
    assert (len(cache), cache.available) == (0, 8)


# Snapshots -----------------------------------------------------------------------------------------------------------


def keep(cache: PrefixCache, key: bytes, *, passing: bool = False) -> int | None:
    slot = cache.snapshot_slot(key)
    if slot is not None:
        cache.keep(key, slot, passing=passing)
    return slot


def test_a_hit_with_state_ends_at_a_snapshot() -> None:
    cache, keys = make(), prompt_keys(range(16), 4)
    blocks = shared(cache, keys)
    assert cache.match(keys, needs_state=True).known == 4
    assert cache.match(keys, needs_state=True).blocks == ()
    slot = keep(cache, keys[1])
    found = cache.match(keys, needs_state=True)
    assert (found.blocks, found.state_slot, found.known) == (blocks[:2], slot, 4)
    assert cache.snapshot_slot(keys[1]) is None, "there is one"


def test_a_snapshot_goes_with_its_block() -> None:
    cache, keys = make(blocks=2), prompt_keys(range(8), 4)
    blocks = shared(cache, keys)
    keep(cache, keys[1])
    cache.unpin(blocks)
    assert cache.take(1, owner("b")) is not None
    cache.check_integrity({})
    assert cache.snapshot_slot(keys[1]) is not None, "its slot is free again"


def test_passing_snapshots_do_not_drive_out_the_others() -> None:
    cache, keys = make(blocks=8), prompt_keys(range(32), 4)
    shared(cache, keys)
    keep(cache, keys[0])
    for key in keys[1:5]:
        keep(cache, key, passing=True)
    assert cache.match(keys[:1], needs_state=True).state_slot is not None
    assert cache.match(keys[:5], needs_state=True).known == 5
    assert len(cache.match(keys[:5], needs_state=True).blocks) == 5, "of those that pass the last one is there"


def test_a_snapshot_of_a_block_that_went_meanwhile_is_dropped() -> None:
    cache, keys = make(blocks=1), prompt_keys(range(4), 4)
    slot = cache.snapshot_slot(keys[0])
    assert slot is not None
    cache.keep(keys[0], slot, passing=False)
    cache.check_integrity({})


# Any order -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_blocks_are_never_lost_nor_read_after_they_went(seed: int, enabled: bool) -> None:
    """What a sequence pins holds what its keys say until it unpins it, whatever else happens."""
    rng = random.Random(seed)
    cache, held = make(blocks=10, snapshots=2, enabled=enabled), dict[str, tuple[list[bytes], tuple[int, ...]]]()
    content: dict[int, bytes] = {}
    for number in range(60):
        if held and rng.random() < 0.45:
            name = rng.choice(sorted(held))
            keys, blocks = held.pop(name)
            assert [content[block] for block in blocks] == keys
            cache.unpin(blocks)
        else:
            family, length = rng.randrange(3), rng.randrange(1, 5)
            keys = prompt_keys(range(family * 100, family * 100 + 4 * length), 4)
            match = cache.match(keys, needs_state=False)
            if length - len(match.blocks) > cache.available - cache.idle(match.blocks):
                continue
            cache.pin(match.blocks)
            fresh = cache.take(length - len(match.blocks), owner(str(number)))
            assert fresh is not None
            for block, key in zip(fresh, keys[len(match.blocks):], strict=True):
                content[block] = key
                cache.share(block, key, owner(str(number)))
                if rng.random() < 0.5:
                    keep(cache, key, passing=rng.random() < 0.5)
            held[str(number)] = keys, match.blocks + fresh
        pins: dict[int, int] = {}
        for _, blocks in held.values():
            for block in blocks:
                pins[block] = pins.get(block, 0) + 1
        cache.check_integrity(pins)
    for _, blocks in held.values():
        cache.unpin(blocks)
    assert cache.available == 10


# Telling ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 32))
@settings(max_examples=300, deadline=None)
def test_changes_add_up_to_what_can_be_found(seed: int) -> None:
    """Blocks and snapshots come, go and are replaced; who hears every change knows what is here, also after too many to tell
    apart."""
    chance = random.Random(seed)
    cache, heard, held = make(6, 2), dict[int, int](), list[tuple[int, ...]]()
    for number in range(60):
        keys = prompt_keys([chance.randrange(3) for _ in range(4 * chance.randint(1, 3))], 4)
        if held and chance.random() < 0.5:
            cache.unpin(held.pop(chance.randrange(len(held))))
        elif len(keys) <= cache.available:
            held.append(shared(cache, keys, str(number)))
            if (slot := cache.snapshot_slot(keys[-1])) is not None:
                cache.keep(keys[-1], slot, passing=chance.random() < 0.5)
        if chance.random() < 0.3 and (changes := cache.changes()) is not None:
            heard = {} if changes.whole else heard
            heard |= changes.levels
    if (changes := cache.changes()) is not None:
        heard = {} if changes.whole else heard
        heard |= changes.levels
    assert cache.changes() is None
    right = dict.fromkeys(short(list(cache._by_key)), 1) | dict.fromkeys(short(list(cache._states)), 2)
    assert {key: level for key, level in heard.items() if level} == right


def test_more_changes_than_the_cache_is_large_are_told_as_a_whole() -> None:
    cache = make(2, 0)
    for number in range(6):
        cache.unpin(shared(cache, prompt_keys([number] * 4, 4), str(number)))
    changes = cache.changes()
    assert changes is not None
    assert (changes.whole, set(changes.levels.values()), len(changes.levels)) == (True, {1}, 2)


def test_states_after_output_take_slots_from_each_other_and_from_no_prompt() -> None:
    cache = make(snapshots=3)
    keys = prompt_keys(range(24), 4)
    blocks = shared(cache, keys)

    def keep(key: bytes, *, output: bool, instead_of: bytes | None = None) -> bool:
        slot = cache.snapshot_slot(None if output else key, instead_of)
        if slot is not None:
            cache.keep(key, slot, passing=False, output=output)
        cache.check_integrity(dict.fromkeys(blocks, 1))
        return slot is not None

    def found() -> list[int]:
        return [depth for depth, key in enumerate(keys) if cache.match(keys[: depth + 1], needs_state=True).blocks
                and len(cache.match(keys[: depth + 1], needs_state=True).blocks) == depth + 1]

    assert keep(keys[0], output=False)
    assert keep(keys[1], output=True)
    assert keep(keys[2], output=True)
    assert keep(keys[3], output=True), "the oldest output goes"
    assert found() == [0, 2, 3]
    assert keep(keys[4], output=True, instead_of=keys[3]), "its own goes, though another is older"
    assert found() == [0, 2, 4]
    assert keep(keys[1], output=False), "a prompt's takes the least recently used one"
    assert keep(keys[3], output=False)
    assert keep(keys[5], output=False)
    assert found() == [1, 3, 5]
    assert not keep(keys[4], output=True), "no prompt's state goes for output"
    assert keep(keys[4], output=True, instead_of=keys[3])
    assert found() == [1, 4, 5]
