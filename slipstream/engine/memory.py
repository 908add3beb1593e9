"""Gives sequences their blocks and state slots, and takes them back. Pure; knows no order of sequences and no tensor.

A sequence starts with memory for its prompt and the first `growth_tokens` of its output, and grows block by block after that.
Whole blocks of what is computed go to the prefix cache as they fill up, so that others find them, and branches share them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from slipstream import block_hash
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.ledger import Owner
from slipstream.engine.prefix_cache import Match, PrefixCache
from slipstream.engine.sequence import Sequence, State
from slipstream.engine.state_pool import StatePool
from slipstream.errors import InternalError


class Copier(Protocol):
    """Copies what units hold, at once and in every layer."""

    def copy_block(self, source: int, target: int) -> None:
        """Keys and values."""

    def copy_state(self, source: int, target: int) -> None:
        """Conv and recurrent states."""


class Memory:
    """The pools of one engine and the cache over them."""

    def __init__(self, blocks: BlockPool, slots: StatePool, cache: PrefixCache, copier: Copier, *, growth_tokens: int,
                 draft_tokens: int = 0) -> None:
        """`draft_tokens`: a step's of one sequence, each of which takes a state slot."""
        self.draft_tokens = draft_tokens
        self.blocks = blocks
        self.slots = slots
        self.cache = cache
        self._copier = copier
        self._growth = growth_tokens

    # How much -----------------------------------------------------------------------------------------------------------

    def demand(self, sequence: Sequence) -> int:
        """Blocks that it and its branches start with, if nothing of it is cached."""
        return self._blocks_of(sequence, min(sequence.rows, sequence.prompt_tokens + self._growth))

    def worst(self, sequence: Sequence) -> int:
        """Blocks that it and its branches may come to hold."""
        return self._blocks_of(sequence, sequence.rows)

    def slots_of(self, sequence: Sequence) -> int:
        """State slots that it and its branches need."""
        return min(1, self.slots.total) * (1 if sequence.split else len(sequence.choices) * (1 + self.draft_tokens))

    def _blocks_of(self, sequence: Sequence, rows: int) -> int:
        one = self.blocks.blocks_for(rows)
        if sequence.split:
            return one
        return one + (len(sequence.choices) - 1) * (one - sequence.prompt_tokens // self.blocks.block_size)

    def fits(self, sequence: Sequence, *, computes: bool, keep: int = 0) -> bool:
        """True if `take` would find what it needs, and leave `keep` blocks."""
        match = self._match(sequence, computes)
        fresh = self.demand(sequence) - len(match.blocks)
        room = self.cache.available - self.cache.idle(match.blocks)
        return fresh + keep <= room and self.slots_of(sequence) <= self.slots.free

    def _match(self, sequence: Sequence, computes: bool) -> Match:
        """What is cached of its prompt, and of use. Who computes must compute one token at least, and all of them where their
        logits are wanted; who does not has the states sent."""
        if sequence.keys is None or (computes and sequence.request.prompt_logprobs is not None):
            return Match()
        size = self.blocks.block_size
        tokens = sequence.prompt_tokens - 1 if computes else sequence.prompt_tokens
        return self.cache.match(sequence.keys[: tokens // size], needs_state=computes and self.slots.total > 0)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a prompt to be computed that are cached now."""
        return len(self._match(sequence, computes=True).blocks) * self.blocks.block_size

    # Taking -------------------------------------------------------------------------------------------------------------

    def take(self, sequence: Sequence, *, computes: bool) -> None:
        """Pin what is cached and take the rest, for its branches too, in the names of their states. It fits."""
        size, match = self.blocks.block_size, self._match(sequence, computes)
        self.cache.pin(match.blocks)
        rows = min(sequence.rows, sequence.prompt_tokens + self._growth)
        self._give(sequence, self.blocks.blocks_for(rows) - len(match.blocks), match.blocks)
        sequence.cached = len(match.blocks) * size
        if computes:
            sequence.computed = sequence.cached
            if match.state_slot is not None and sequence.state_slot is not None:
                self._copier.copy_state(match.state_slot, sequence.state_slot)
            last = (sequence.prompt_tokens - 1) // size * size
            sequence.snapshot_at = tuple(sorted({match.known * size, last}))
        for branch in sequence.branches:
            self._give(branch, self.blocks.blocks_for(rows) - sequence.prompt_tokens // size, ())

    def _give(self, sequence: Sequence, count: int, shared: tuple[int, ...]) -> None:
        fresh = self.cache.take(count, sequence.owner)
        assert fresh is not None, "the caller checked that it fits"
        sequence.blocks, sequence.shared = shared + fresh, len(shared)
        if self.slots.total:
            slots = self.slots.take(sequence.owner, 1 if sequence.split else 1 + self.draft_tokens)
            assert slots is not None, "the caller checked that it fits"
            sequence.state_slot, *spare = slots
            sequence.spare_slots = tuple(spare)

    def lendable(self, sequence: Sequence, keep: int) -> bool:
        """True if some of its prompt is cached, and `lend` would find a slot and leave `keep` blocks."""
        match = self._match(sequence, computes=True)
        left = self.cache.available - self.cache.idle(match.blocks)
        return bool(match.blocks) and left >= keep and self.slots_of(sequence) <= self.slots.free

    def lend(self, sequence: Sequence) -> None:
        """Pin what is cached of its prompt, and copy the states after that, in the name of its state. It is `lendable`."""
        match = self._match(sequence, computes=True)
        self.cache.pin(match.blocks)
        self._give(sequence, 0, match.blocks)
        sequence.cached = sequence.computed = len(match.blocks) * self.blocks.block_size
        if match.state_slot is not None and sequence.state_slot is not None:
            self._copier.copy_state(match.state_slot, sequence.state_slot)

    def has_next_row(self, sequence: Sequence) -> bool:
        """True if it has a block for its next row."""
        return self.room(sequence) > 0

    def room(self, sequence: Sequence) -> int:
        """Rows from its next one on that it has blocks for."""
        return len(sequence.blocks) * self.blocks.block_size - sequence.computed

    def grow(self, sequence: Sequence, rows: int = 1) -> bool:
        """Make sure that the next `rows` have blocks; False, and nothing changes, if there are too few."""
        short = self.blocks.blocks_for(sequence.computed + rows) - len(sequence.blocks)
        fresh = self.cache.take(max(0, short), sequence.owner)
        if fresh is None:
            return False
        sequence.blocks += fresh
        return True

    def may_grow(self, sequence: Sequence) -> bool:
        """True if it does not hold yet all that it may come to need."""
        return len(sequence.blocks) < self.blocks.blocks_for(sequence.rows)

    # Sharing ------------------------------------------------------------------------------------------------------------

    def share_full(self, sequence: Sequence) -> None:
        """Its whole blocks are final: others may find them."""
        if self.cache.enabled and sequence.keys is not None:
            self._share(sequence, sequence.computed // self.blocks.block_size)

    def _share(self, sequence: Sequence, count: int) -> None:
        for index in range(sequence.shared, count):
            self.cache.share(sequence.blocks[index], self._key(sequence, index), sequence.owner)
            sequence.shared = index + 1

    def _key(self, sequence: Sequence, index: int) -> bytes | None:
        """Of its block `index`, whose tokens are known."""
        keys, size = sequence.keys, self.blocks.block_size
        if keys is None:
            return None
        if index == len(keys):
            parent = keys[-1] if keys else block_hash.root(sequence.request.cache_salt)
            keys.append(block_hash.extend(parent, sequence.token_ids(index * size, (index + 1) * size)))
        return keys[index]

    def branch(self, sequence: Sequence, branch: Sequence) -> None:
        """`branch` reads the whole blocks of the prompt with it, and gets copies of its last, partial block and its states."""
        whole = sequence.computed // self.blocks.block_size
        self._share(sequence, whole)
        shared = sequence.blocks[:whole]
        self.cache.pin(shared)
        branch.blocks, branch.shared = shared + branch.blocks, whole
        if sequence.computed % self.blocks.block_size:
            self._copier.copy_block(sequence.blocks[whole], branch.blocks[whole])
        if sequence.state_slot is not None and branch.state_slot is not None:
            self._copier.copy_state(sequence.state_slot, branch.state_slot)
        branch.computed, branch.cached = sequence.computed, sequence.cached
        branch.keys = None if sequence.keys is None else sequence.keys[:whole]

    def choose_state(self, sequence: Sequence, accepted: int) -> None:
        """Its state is now the one after so many drafts of the last step: that slot becomes its own, the other a spare one."""
        if accepted and sequence.state_slot is not None:
            spare = list(sequence.spare_slots)
            spare[accepted - 1], sequence.state_slot = sequence.state_slot, spare[accepted - 1]
            sequence.spare_slots = tuple(spare)

    # Snapshots ----------------------------------------------------------------------------------------------------------

    def snapshots(self, sequence: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """(length, slot) of each snapshot that a chunk of tokens [start, end) should leave, ascending. Of its output a sequence
        leaves the latest: the next turn of a conversation begins with all of it."""
        if sequence.keys is None or not self.slots.total:
            return ()
        size = self.blocks.block_size
        found = []
        if start >= sequence.prompt_tokens:
            length = end - end % size  # if it lies behind drafts, its key is not known yet
            slot = self.cache.snapshot_slot(None, instead_of=sequence.snapshot) if start < length else None
            return () if slot is None else ((length, slot),)
        for length in sorted({*sequence.snapshot_at, end - end % size}):
            if start < length <= end and length // size <= len(sequence.keys):
                slot = self.cache.snapshot_slot(sequence.keys[length // size - 1])
                if slot is not None:
                    found.append((length, slot))
        return tuple(found)

    def keep_snapshots(self, sequence: Sequence, snapshots: Iterable[tuple[int, int]]) -> None:
        """The chunk is computed, its snapshots were taken and its blocks are shared. Those behind drafts that were wrong are of
        no use."""
        assert sequence.keys is not None, "only what can be found has snapshots"
        for length, slot in snapshots:
            if length > sequence.computed:
                self.cache.drop(slot)
                continue
            key, output = sequence.keys[length // self.blocks.block_size - 1], length > sequence.prompt_tokens
            self.cache.keep(key, slot, passing=not output and length not in sequence.snapshot_at, output=output)
            if output:
                sequence.snapshot = key

    def keep_all(self, sequence: Sequence) -> int:
        """What a reservation of whole blocks was filled with goes to the cache, with the states after it. How many more tokens
        can be found now."""
        def found() -> int:
            return len(self.cache.match(sequence.keys or (), needs_state=self.slots.total > 0).blocks)

        before, sequence.computed = found(), sequence.prompt_tokens
        self.share_full(sequence)
        assert sequence.keys, "whole blocks have keys"
        slot = self.cache.snapshot_slot(sequence.keys[-1]) if sequence.state_slot is not None else None
        if slot is not None and sequence.state_slot is not None:
            self._copier.copy_state(sequence.state_slot, slot)
            self.cache.keep(sequence.keys[-1], slot, passing=False)
        return (found() - before) * self.blocks.block_size

    # Giving back --------------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """All that the sequence holds returns."""
        self.blocks.give_back(sequence.blocks[sequence.shared :], sequence.owner)
        self.cache.unpin(sequence.blocks[: sequence.shared])
        self.slots.give_back(sequence.slots, sequence.owner)
        sequence.blocks, sequence.shared, sequence.state_slot, sequence.spare_slots = (), 0, None, ()

    def rename(self, sequence: Sequence, old: Owner) -> None:
        """The sequence's state has changed: what it owns is held in its new name."""
        if old != sequence.owner:
            self.blocks.reassign(sequence.blocks[sequence.shared :], old, sequence.owner)
            self.slots.reassign(sequence.slots, old, sequence.owner)

    # Proof --------------------------------------------------------------------------------------------------------------

    def check_write(self, sequence: Sequence, start: int, count: int) -> None:
        """Raise InternalError unless rows [start, start + count) and the slots are the sequence's own."""
        if start + count > sequence.rows:
            raise InternalError(f"{sequence.id} would write row {start + count - 1} of {sequence.rows}")
        self.blocks.check_write(sequence.blocks, start, count, sequence.owner)
        self.slots.check_owner(sequence.slots, sequence.owner)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise InternalError unless pools, cache and sequences agree about every block and slot."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        blocks, slots, pins = {}, {}, dict[int, int]()
        for sequence in sequences:
            if sequence.state is State.WAITING:
                if sequence.blocks or sequence.state_slot is not None:
                    raise InternalError(f"{sequence.id} waits and holds memory")
                continue
            for block in sequence.blocks[: sequence.shared]:
                pins[block] = pins.get(block, 0) + 1
            blocks.update(dict.fromkeys(sequence.blocks[sequence.shared :], sequence.owner))
            slots.update(dict.fromkeys(sequence.slots, sequence.owner))
        self.cache.check_integrity(pins)
        owned = {block: owner for block, owner in self.blocks.owned().items() if owner.request is not None}
        for what, held, theirs in (("blocks", blocks, owned), ("slots", slots, self.slots.owned())):
            if held != theirs:
                wrong = ", ".join(sorted(f"{unit} of {owner}" for unit, owner in held.items() ^ theirs.items()))
                raise InternalError(f"sequences and pool disagree about {what}: {wrong}")
