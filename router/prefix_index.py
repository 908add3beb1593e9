"""Which workers hold which beginnings of prompts, by the keys of their blocks. Pure; knows no prompt and no policy.

A key is chained over all tokens before it, so that a flat map from key to workers is a radix tree whose walk is one look-up a
block. A worker's part is what it told itself, `hear`, in numbered messages: the first one it has to say is a reset, and after a
number that is missing nothing counts until the next reset, for which the router asks. `predict` adds what was just routed: it
is taken for there until the worker speaks of it, or for one or two times `predict_seconds`.

One budget bounds the keys of all workers together. Beyond it the oldest go, whoever holds them: a key that is missing costs a
hit and nothing else. A worker that leaves is out at once, and what it alone held goes piece by piece, so that no call is long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

BYTES_A_KEY = 320
"""At most, in a map of many, with the room that it grows into."""
PREDICTED_SHARE = 8
"""One in so many of the budget is the most that predictions take, and those of them that are young again."""
SWEPT = 1024
"""Keys that one call looks at for what is left of workers that have gone."""
NOTHING: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Worker:
    slot: int
    number: int = 0
    in_order: bool = False
    """False until a reset, and after a message that is missing."""


class PrefixIndex:
    """Two bits of each key's mask are a worker's: it has the block, and has a snapshot of the recurrent states at its end."""

    def __init__(self, max_keys: int, predict_seconds: float) -> None:
        """`predict_seconds` 0: nothing is predicted."""
        self._max_keys = max_keys
        self._predict_seconds = predict_seconds
        self._masks: dict[int, int] = {}  # in the order in which they were told of, or last routed by
        self._guessed: dict[int, int] = {}  # predictions, of the masks' form
        self._young: dict[int, int] = {}  # those of them that live on when the others go
        self._turned = 0.0
        self._workers: dict[str, _Worker] = {}
        self._names: dict[int, str] = {}  # by slot
        self._live = 0  # block bits of all workers
        self._dead = 0  # bits of workers that have gone, which masks may still hold
        self._sweeping = 0
        self._left: list[int] = []  # keys to be swept

    def __len__(self) -> int:
        """Keys, predicted ones included: what the budget bounds."""
        return len(self._masks) + len(self._guessed) + len(self._young)

    @property
    def workers(self) -> list[str]:
        """Those that are in."""
        return list(self._workers)

    def keys(self, worker: str) -> dict[int, int]:
        """What a worker told of, for tests: key to level, 1 for a block and 2 for one with a snapshot."""
        known = self._workers.get(worker)
        bit = 2 * known.slot if known else 0
        return {key: (mask >> bit & 3).bit_count() for key, mask in self._masks.items() if known and mask >> bit & 3}

    # What workers say ---------------------------------------------------------------------------------------------------

    def add(self, worker: str) -> None:
        """A worker without keys; one that was here is forgotten first."""
        self.remove(worker)
        slot = 0
        while (3 << 2 * slot) & (self._dead | self._live | self._live << 1):
            slot += 1
        self._workers[worker], self._names[slot] = _Worker(slot), worker
        self._live |= 1 << 2 * slot

    def remove(self, worker: str) -> None:
        """It has gone, or what it holds is not known any more."""
        if (known := self._workers.pop(worker, None)) is None:
            return
        del self._names[known.slot]
        bits = 3 << 2 * known.slot
        self._live &= ~bits
        self._dead |= bits
        for predicted in (self._guessed, self._young):
            for key in [key for key, mask in predicted.items() if mask & bits]:
                _clear(predicted, key, bits)

    def hear(self, worker: str, number: int, *, reset: bool, blocks: Iterable[int] = (), snapshots: Iterable[int] = (),
             removed: Iterable[int] = ()) -> bool:
        """A message of a worker. False: one before it is missing, so that a replay is needed; nothing counts until it comes."""
        self._sweep()
        known = self._workers.get(worker)
        if known is None:
            return True  # it has just gone
        if reset:
            if known.in_order:
                self.add(worker)
                known = self._workers[worker]
            known.in_order = True
        elif known.in_order and number != known.number + 1:
            known.in_order = False
            self.add(worker)
            self._workers[worker].number = number
            return False
        known.number = number
        if not known.in_order:
            return True
        bit = 1 << 2 * known.slot
        for key in removed:
            self._tell(key, 0, 3 * bit)
        for key in snapshots:
            self._tell(key, 3 * bit, 3 * bit)
        for key in blocks:
            self._tell(key, bit, 3 * bit)
        self._fit()
        return True

    def _tell(self, key: int, value: int, bits: int) -> None:
        mask = self._masks.get(key, 0) & ~bits | value
        if mask:
            self._masks[key] = mask
        else:
            self._masks.pop(key, None)
        for predicted in (self._guessed, self._young):
            if key in predicted:
                _clear(predicted, key, bits)

    # What is routed -----------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[int], computable: int, *, predicted: bool = True) -> Mapping[str, tuple[int, int]]:
        """By worker, of those that hold any: how many of the first of `keys` it holds, and at how many of them, up to
        `computable`, its last snapshot is. `predicted` False: only what workers told counts."""
        masks, guessed = self._masks.get, self._guessed if predicted else {}
        alive, depth = self._live, 0
        found: dict[str, tuple[int, int]] = {}
        states: dict[int, int] = {}  # snapshot bits to depth
        for key in keys:
            mask = masks(key, 0)
            if alive & ~mask and key in guessed:
                mask |= guessed[key]
            if lost := alive & ~mask:
                if depth:
                    self._end(lost, depth, states, found)
                alive &= mask
                if not alive:
                    return found
            depth += 1
            if depth <= computable and (there := mask & alive << 1):
                states[there] = depth
        if depth:
            self._end(alive, depth, states, found)
        return found

    def _end(self, bits: int, depth: int, states: Mapping[int, int], found: dict[str, tuple[int, int]]) -> None:
        while bits:
            bit = bits & -bits
            state = max((at for there, at in states.items() if there & bit << 1), default=0) if states else 0
            found[self._names[bit.bit_length() >> 1]] = (depth, state)
            bits ^= bit

    def predict(self, keys: Sequence[int], workers: Iterable[str], now: float, *, snapshot: int = 0) -> None:
        """`workers` will soon hold all of `keys`, with a snapshot at the end of the first `snapshot`."""
        self._sweep()
        if now - self._turned >= self._predict_seconds:
            gone = now - self._turned >= 2 * self._predict_seconds
            self._guessed, self._young, self._turned = {} if gone else self._young, {}, now
        bits = sum(1 << 2 * known.slot for worker in workers if (known := self._workers.get(worker)))
        if not bits or not self._predict_seconds:
            return
        masks = self._masks
        if len(self) > self._max_keys // 4 * 3:  # the oldest may have to go soon: what is used is not old
            for key in reversed(keys):
                if (mask := masks.pop(key, 0)) and (mask & (self._live | self._live << 1)):
                    masks[key] = mask
        for key in keys:
            if missing := bits & ~masks.get(key, 0):
                self._guess(key, missing)
        if 0 < snapshot <= len(keys) and (missing := bits << 1 & ~masks.get(key := keys[snapshot - 1], 0)):
            self._guess(key, missing)
        if len(self._guessed) > self._max_keys // PREDICTED_SHARE:
            few = dict(islice(reversed(self._young.items()), self._max_keys // PREDICTED_SHARE // 2))
            self._guessed, self._young, self._turned = few, {}, now
        self._fit()

    def _guess(self, key: int, bits: int) -> None:
        self._guessed[key] = self._guessed.get(key, 0) | bits
        self._young[key] = self._young.get(key, 0) | bits

    # --------------------------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """Keep the budget: predictions have their share; of what was told the oldest go, some at a time."""
        if len(self) > self._max_keys:
            many = min(len(self._masks), len(self) - self._max_keys + self._max_keys // 16)
            for key in list(islice(self._masks, many)):
                del self._masks[key]

    def _sweep(self) -> None:
        """Look at some keys for what workers left that have gone; then their bits can be used again."""
        if not self._left:
            if self._sweeping:
                self._dead &= ~self._sweeping
                self._sweeping = 0
            if not self._dead:
                return
            self._sweeping, self._left = self._dead, list(self._masks)
        masks, bits = self._masks, self._sweeping
        for key in self._left[-SWEPT:]:
            if masks.get(key, 0) & bits:
                _clear(masks, key, bits)
        del self._left[-SWEPT:]


def _clear(masks: dict[int, int], key: int, bits: int) -> None:
    if mask := masks[key] & ~bits:
        masks[key] = mask
    else:
        del masks[key]
