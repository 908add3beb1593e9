"""Blocks that any number of sequences may read, found by what they hold, and state snapshots at their ends. Pure.

Whatever can be found, or no longer, is noted for those who route by it: `changes`.

Ledger: a block that is shared belongs to the cache and is never written again. Each sequence that has it in its table pins it;
one that nobody pins is idle: it can still be found, and goes, least recently used first, when a sequence needs a fresh block.
A block without a key cannot be found: it is only shared, and returns to the free list with its last pin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream import cache_keys
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.ledger import Owner, OwnerKind
from slipstream.engine.state_pool import StatePool
from slipstream.errors import InternalError

CACHE = Owner(kind=OwnerKind.CACHE)


@dataclass(frozen=True, kw_only=True)
class Match:
    """The longest beginning of a prompt that is here."""

    blocks: tuple[int, ...] = ()
    state_slot: int | None = None
    """Snapshot of the recurrent states after exactly these blocks; None for a model without, or where it was not asked for."""
    known: int = 0
    """Blocks that are here, with or without a snapshot: where a snapshot would have helped."""


@dataclass(frozen=True, kw_only=True)
class CacheChanges:
    """What can be found now of what may have changed, by short key (`slipstream.cache_keys.short`)."""

    levels: Mapping[int, int]
    """0: gone; 1: the block is here; 2: with a snapshot of the states at its end."""
    whole: bool = False
    """These are all: what is not here is gone."""


@dataclass(kw_only=True)
class _Shared:
    key: bytes | None
    pins: int


class PrefixCache:
    """Over one pool of blocks, and a pool of snapshot slots, which may be empty."""

    def __init__(self, blocks: BlockPool, snapshots: StatePool, *, enabled: bool = True) -> None:
        """`enabled` False: nothing is found, and nothing stays after its last pin."""
        self.enabled = enabled
        self.evicted = 0
        """Blocks so far that went to make room."""
        self._blocks = blocks
        self._snapshots = snapshots
        self._shared: dict[int, _Shared] = {}
        self._by_key: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._states: OrderedDict[bytes, int] = OrderedDict()  # key of the last block -> slot; least recently used first
        self._written: set[int] = set()  # slots that steps in flight write
        self._of_output: set[int] = set()  # slots of states after output
        self._changed: set[bytes] | None = set()  # keys, since `changes` was asked; None: too many to tell apart

    def __len__(self) -> int:
        """Blocks that the cache owns."""
        return len(self._shared)

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free and idle ones."""
        return self._blocks.free + len(self._idle)

    def take(self, count: int, owner: Owner) -> tuple[int, ...] | None:
        """`count` fresh blocks for `owner`, evicting idle ones where needed; None if there are too few."""
        if count > self.available:
            return None
        while self._blocks.free < count:
            self._evict()
        return self._blocks.take(count, owner)

    # Finding ------------------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], *, needs_state: bool) -> Match:
        """The longest beginning of `keys` that is here; with `needs_state` only up to a snapshot."""
        blocks: list[int] = []
        for key in keys if self.enabled else ():
            if (block := self._by_key.get(key)) is None:
                break
            blocks.append(block)
        if not needs_state:
            return Match(blocks=tuple(blocks), known=len(blocks))
        for count in range(len(blocks), 0, -1):
            if (slot := self._states.get(keys[count - 1])) is not None:
                return Match(blocks=tuple(blocks[:count]), state_slot=slot, known=len(blocks))
        return Match(known=len(blocks))

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these shared blocks nobody pins."""
        return sum(block in self._idle for block in blocks)

    def pin(self, blocks: Iterable[int]) -> None:
        """One more sequence reads these shared blocks. A snapshot at the end of them was just used."""
        last = None
        for last in blocks:
            self._shared[last].pins += 1
            self._idle.pop(last, None)
        if last is not None and (key := self._shared[last].key) in self._states:
            assert key is not None, "only a block with a key has a snapshot"
            self._states.move_to_end(key)

    def unpin(self, blocks: Sequence[int]) -> None:
        """A sequence reads them no more. The deepest one is forgotten first: it is of no use without those before it."""
        for block in reversed(blocks):
            shared = self._shared[block]
            if shared.pins < 1:
                raise InternalError(f"block {block} is unpinned more often than pinned")
            shared.pins -= 1
            if shared.pins:
                continue
            if shared.key is None or not self.enabled:
                self._free(block)
            else:
                self._idle[block] = None

    # Keeping ------------------------------------------------------------------------------------------------------------

    def share(self, block: int, key: bytes | None, owner: Owner) -> None:
        """`owner` will not write into `block` any more: it goes to the cache, pinned once. If another block has that key
        already, this one is shared without."""
        self._blocks.reassign((block,), owner, CACHE)
        if key is not None and (key in self._by_key or not self.enabled):
            key = None
        if key is not None:
            self._by_key[key] = block
            self._note(key)
        self._shared[block] = _Shared(key=key, pins=1)

    def snapshot_slot(self, key: bytes | None, instead_of: bytes | None = None) -> int | None:
        """A slot for the state after the block of `key`, from another snapshot if need be; None if there is one already, or no
        slot at all. `keep` or `drop` it when the step that writes it is over. `key` None: a block of output, which may not be
        known yet; it takes a slot from other output alone. `instead_of`: the block of a snapshot that goes for it."""
        if not self.enabled or not self._snapshots.total or key in self._states:
            return None
        old = instead_of if instead_of is not None and instead_of in self._states else None
        if old is None and not self._snapshots.free:
            old = next((one for one, held in self._states.items() if key is not None or held in self._of_output), None)
            if old is None:
                return None
        if old is not None:
            self.drop(self._states.pop(old))
            self._note(old)
        taken = self._snapshots.take(CACHE)
        assert taken is not None, "one is free"
        (slot,) = taken
        self._written.add(slot)
        return slot

    def keep(self, key: bytes, slot: int, *, passing: bool, output: bool = False) -> None:
        """The slot holds the state now. `passing`: one of a long prompt's many, the first to go. `output`: of a sequence's."""
        if key not in self._by_key or key in self._states:
            self.drop(slot)
            return
        self._written.remove(slot)
        self._states[key] = slot
        if output:
            self._of_output.add(slot)
        self._note(key)
        if passing:
            self._states.move_to_end(key, last=False)

    def drop(self, slot: int) -> None:
        """The slot will not be needed."""
        self._written.discard(slot)
        self._of_output.discard(slot)
        self._snapshots.give_back((slot,), CACHE)

    # Telling ------------------------------------------------------------------------------------------------------------

    def changes(self) -> CacheChanges | None:
        """Since this was asked last; None if nothing changed."""
        changed, self._changed = self._changed, set()
        if changed is not None and not changed:
            return None
        keys = list(self._by_key if changed is None else changed)
        levels = ((key in self._by_key) + (key in self._states) for key in keys)
        return CacheChanges(levels=dict(zip(cache_keys.short(keys), levels, strict=True)), whole=changed is None)

    def _note(self, key: bytes) -> None:
        if self._changed is not None:
            self._changed.add(key)
            if len(self._changed) > 2 * self._blocks.total:
                self._changed = None

    # Proof --------------------------------------------------------------------------------------------------------------

    def check_integrity(self, pins: Mapping[int, int]) -> None:
        """Raise InternalError unless pools, keys and the `pins` of all sequences (by block) agree."""
        self._snapshots.check_integrity()
        counted = {block: shared.pins for block, shared in self._shared.items() if shared.pins}
        if counted != dict(pins):
            raise InternalError(f"pins of blocks are counted wrong: {sorted(counted.items() ^ dict(pins).items())}")
        owned = {block for block, owner in self._blocks.owned().items() if owner == CACHE}
        if owned != self._shared.keys():
            raise InternalError(f"cache and pool disagree about shared blocks: {owned ^ self._shared.keys()}")
        if {block for block, shared in self._shared.items() if not shared.pins} != self._idle.keys():
            raise InternalError("a block that nobody pins is not idle, or an idle one is pinned")
        if self._by_key != {shared.key: block for block, shared in self._shared.items() if shared.key is not None}:
            raise InternalError("a key leads to the wrong block")
        slots = {*self._states.values(), *self._written}
        if not self._states.keys() <= self._by_key.keys() or slots != self._snapshots.owned().keys():
            raise InternalError("a snapshot has no block, or a slot no snapshot")
        if not self._of_output <= set(self._states.values()):
            raise InternalError("a slot counts as output's and holds none")

    # --------------------------------------------------------------------------------------------------------------------

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        self.evicted += 1
        self._free(block)

    def _free(self, block: int) -> None:
        key = self._shared.pop(block).key
        if key is not None:
            del self._by_key[key]
            self._note(key)
            if (slot := self._states.pop(key, None)) is not None:
                self.drop(slot)
        self._blocks.give_back((block,), CACHE)
