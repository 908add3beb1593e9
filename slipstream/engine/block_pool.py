"""The KV blocks of a replica and who owns them; knows no tensor and no sequence's state."""

from __future__ import annotations

from slipstream.engine.ledger import Ledger, Owner


class BlockPool:
    """`total` blocks of `block_size` tokens. A block is owned by the free list, the prefix cache, or a sequence under one of
    its names: sequence, reservation, transfer."""

    def __init__(self, total: int, block_size: int) -> None:
        self.block_size = block_size
        self._ledger = Ledger(total, "block")

    @property
    def total(self) -> int:
        """Blocks that exist."""
        return self._ledger.total

    @property
    def free(self) -> int:
        """Blocks that nobody owns."""
        return self._ledger.free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int, owner: Owner) -> tuple[int, ...] | None:
        """`count` blocks for `owner`, or None if fewer are free."""
        return self._ledger.take(count, owner)

    def give_back(self, blocks: tuple[int, ...], owner: Owner) -> None:
        """Return `blocks` of `owner`. Raises InternalError on a double or foreign free."""
        self._ledger.give_back(blocks, owner)

    def reassign(self, blocks: tuple[int, ...], old: Owner, new: Owner) -> None:
        """Hand `blocks` from `old` to `new`."""
        self._ledger.reassign(blocks, old, new)

    def check_write(self, blocks: tuple[int, ...], first: int, count: int, owner: Owner) -> None:
        """Raise InternalError unless `owner` owns the blocks of rows [first, first + count) of the block table `blocks`."""
        self._ledger.check_owner(blocks[first // self.block_size : self.blocks_for(first + count)], owner)

    def owned(self) -> dict[int, Owner]:
        """Every block that is not free, with its owner."""
        return self._ledger.owned()

    def check_integrity(self) -> None:
        """Raise InternalError unless every block has exactly one owner."""
        self._ledger.check_integrity()
