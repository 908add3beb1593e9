"""What the prefix cache holds, told to the routers that watch: a reset, then every change, in numbered messages. Knows no pool.

What a slow watcher has not read is merged by key, so that it is bounded by the cache and by what left it since.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from slipstream.v1 import worker_pb2 as pb

MAX_KEYS = 1 << 13
"""Of one message: what follows waits for the next, and no token waits behind it for long."""


class CacheFeed:
    """The cache of one replica, as the engine last told it: short key to level, 1 for a block, 2 for one with a snapshot."""

    def __init__(self) -> None:
        self._levels: dict[int, int] = {}
        self._watches: set[CacheWatch] = set()

    def __len__(self) -> int:
        return len(self._levels)

    def apply(self, levels: Mapping[int, int], *, whole: bool) -> None:
        """What can be found now, 0 for what is gone. `whole`: there is nothing else."""
        if whole:
            self._levels.clear()
        for key, level in levels.items():
            if level:
                self._levels[key] = level
            else:
                self._levels.pop(key, None)
        for watch in self._watches:
            watch.note(self._levels if whole else levels, whole=whole)

    def watch(self) -> CacheWatch:
        """A new watcher; `close` it."""
        watch = CacheWatch(self)
        watch.note(self._levels, whole=True)
        self._watches.add(watch)
        return watch

    def forget(self, watch: CacheWatch) -> None:
        """It is closed."""
        self._watches.discard(watch)

    def all(self) -> Mapping[int, int]:
        """Everything that is here."""
        return self._levels


class CacheWatch:
    """What one router has not been told yet."""

    def __init__(self, feed: CacheFeed) -> None:
        self._feed = feed
        self._pending: dict[int, int] = {}
        self._reset = False
        self._number = 0

    @property
    def waits(self) -> bool:
        """True if there is something to tell."""
        return self._reset or bool(self._pending)

    def note(self, levels: Mapping[int, int], *, whole: bool) -> None:
        """Something changed."""
        if whole:
            self._reset, self._pending = True, dict(levels)
            return
        self._pending.update(levels)
        if len(self._pending) > 2 * len(self._feed) + MAX_KEYS:
            self._reset, self._pending = True, dict(self._feed.all())

    def next(self) -> pb.CacheChanges:
        """The next message."""
        keys = list(islice(self._pending, MAX_KEYS))
        told = {0: list[int](), 1: list[int](), 2: list[int]()}
        for key in keys:
            told[self._pending.pop(key)].append(key)
        self._number += 1
        reset, self._reset = self._reset, False
        return pb.CacheChanges(number=self._number, reset=reset, blocks=told[1], snapshots=told[2],
                               removed=[] if reset else told[0])

    def close(self) -> None:
        """Nothing more is wanted."""
        self._feed.forget(self)
