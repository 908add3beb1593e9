"""The prefix index: it knows what workers told, whatever is lost on the way; it keeps its budget; it guesses for a while."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prefix_index import BYTES_A_KEY, PrefixIndex

CHAINS = [[10 * chain + depth for depth in range(1, 7)] for chain in range(3)]
WORKERS = ["a", "b", "c"]
KEYS = [key for chain in CHAINS for key in chain]


class Plain:
    """One worker as it is: its keys, and the messages that it has sent, each of which may be lost."""

    def __init__(self) -> None:
        self.levels: dict[int, int] = {}
        self.number = 0

    def change(self, levels: dict[int, int], *, reset: bool = False) -> dict[str, object]:
        self.number += 1
        self.levels = {key: level for key, level in {**self.levels, **levels}.items() if level}
        told = self.levels if reset else levels
        by_level = {level: [key for key, value in told.items() if value == level] for level in (0, 1, 2)}
        return {"number": self.number, "reset": reset, "blocks": by_level[1], "snapshots": by_level[2], "removed": by_level[0]}


def expected(levels: dict[int, int], keys: list[int], computable: int) -> tuple[int, int]:
    depth = next((i for i, key in enumerate(keys) if key not in levels), len(keys))
    return depth, max((i + 1 for i in range(min(depth, computable)) if levels[keys[i]] == 2), default=0)


LEVELS = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([0, 1, 2]), max_size=8)
EVENT = st.tuples(st.sampled_from(["change", "change", "lose", "reconnect", "leave"]), st.sampled_from(WORKERS), LEVELS)


@given(st.lists(EVENT, max_size=40), st.data())
@settings(max_examples=400, deadline=None)
def test_the_index_is_what_the_workers_told_after_any_losses(events: list[tuple[str, str, dict[int, int]]],
                                                              data: st.DataObject) -> None:
    """A message that is missing is noticed with the next one, and a replay mends it; a plain map per worker is the measure."""
    index, workers, heard = PrefixIndex(1000, 0), dict[str, Plain](), dict[str, bool]()
    for what, name, levels in events:
        if what == "leave":
            index.remove(name)
            workers.pop(name, None)
        elif what == "reconnect" or name not in workers:
            index.add(name)
            workers[name] = Plain()
            assert index.hear(name, **workers[name].change(levels, reset=True))  # type: ignore[arg-type]
            heard[name] = True
        elif what == "lose":
            workers[name].change(levels)
            heard[name] = False
        elif not index.hear(name, **workers[name].change(levels)):  # type: ignore[arg-type]
            assert not heard[name], "nothing was lost, and a replay is asked for"
            assert index.keys(name) == {}, "what may be wrong does not count"
            late = workers[name].change({})
            assert index.hear(name, **late), "it asks once"  # type: ignore[arg-type]
            assert index.keys(name) == {}
            assert index.hear(name, **workers[name].change({}, reset=True))  # type: ignore[arg-type]
            heard[name] = True
        else:
            assert heard[name], "a message was lost and nobody noticed"
        if all(heard[known] for known in workers):
            assert {known: index.keys(known) for known in index.workers} == {
                known: plain.levels for known, plain in workers.items()}
    if all(heard[known] for known in workers):
        keys = data.draw(st.sampled_from(CHAINS))
        computable = data.draw(st.integers(0, len(keys)))
        found = {name: expected(plain.levels, keys, computable) for name, plain in workers.items()}
        assert index.match(keys, computable) == {name: hit for name, hit in found.items() if hit[0]}


def told(index: PrefixIndex, worker: str, keys: list[int], number: int = 1) -> None:
    assert index.hear(worker, number, reset=number == 1, blocks=keys)


def test_a_worker_that_leaves_is_out_at_once_and_what_it_left_goes_piece_by_piece() -> None:
    index = PrefixIndex(100_000, 0)
    for name in ("a", "b"):
        index.add(name)
    told(index, "a", list(range(5000)))
    told(index, "b", list(range(4000, 6000)))
    index.remove("a")
    assert index.match([0, 1], 2) == {}
    assert index.match([4000, 4001], 2) == {"b": (2, 0)}
    index.add("c")  # in its place another comes, before it is swept
    told(index, "c", [0, 1])
    assert index.match([0, 1, 2], 3) == {"c": (2, 0)}
    for number in range(2, 20):
        told(index, "b", [], number)
    assert len(index) == 2002, "of the one that left nothing is kept"


def test_many_that_come_and_go_leave_nothing() -> None:
    """Their bits are used again: masks stay as wide as the workers are many."""
    index = PrefixIndex(10_000, 10.0)
    index.add("stays")
    told(index, "stays", [1, 2])
    for number in range(300):
        index.add(f"w{number}")
        told(index, f"w{number}", list(range(number, number + 50)))
        index.predict([7, 8], [f"w{number}"], now=0.0)
        index.remove(f"w{number}")
    for number in range(2, 6):
        told(index, "stays", [], number)
    index.add("last")
    assert len(index) == 2
    assert index._live < 1 << 8


@pytest.mark.parametrize("predicted", [False, True])
def test_one_budget_bounds_all_workers_together(predicted: bool) -> None:
    """RT-16: unique prompts without end through 8 workers; the size does not follow, and of what is used most stays."""
    most = 20_000
    index, source = PrefixIndex(most, 10.0), random.Random(1)
    names = [f"w{number}" for number in range(8)]
    for name in names:
        index.add(name)
        told(index, name, [])
    hot = [source.getrandbits(64) for _ in range(50)]
    told(index, "w0", hot, 2)
    numbers = dict.fromkeys(names, 1) | {"w0": 2}
    tracemalloc.start()
    for number in range(4000):
        name = names[number % 8]
        keys = [source.getrandbits(64) for _ in range(25)]
        if predicted:
            index.predict(keys, [name], now=number / 100)
        else:
            numbers[name] += 1
            told(index, name, keys, numbers[name])
        index.predict(hot, ["w0"], now=number / 100)  # routed by, again and again
        assert len(index) <= most
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < most * BYTES_A_KEY
    assert index.match(hot, 50)["w0"] == (50, 0)
    assert predicted or set(hot) <= index.keys("w0").keys(), "what is used is not the oldest"


def test_a_guess_counts_until_the_worker_speaks_or_the_time_is_over() -> None:
    index = PrefixIndex(1000, 10.0)
    index.add("a")
    told(index, "a", [1])
    index.predict([1, 2, 3], ["a", "unknown"], now=100.0, snapshot=3)
    assert index.match([1, 2, 3, 4], 4) == {"a": (3, 3)}
    assert index.keys("a") == {1: 1}, "it was not told"
    told(index, "a", [2], 2)
    assert index.hear("a", 3, reset=False, removed=[2])
    assert index.match([1, 2, 3], 3) == {"a": (1, 0)}, "the worker knows better"
    index.predict([1, 2, 3], ["a"], now=101.0)
    index.predict([8], ["a"], now=111.0)
    assert index.match([1, 2, 3], 3)["a"][0] == 3, "not before the time is over"
    index.predict([9], ["a"], now=122.0)
    assert index.match([1, 2, 3], 3)["a"][0] == 1
    index.predict([1, 2], ["a"], now=500.0)
    index.remove("a")
    index.add("a")
    assert index.match([1, 2], 2) == {}


def test_without_time_nothing_is_guessed() -> None:
    index = PrefixIndex(1000, 0)
    index.add("a")
    index.predict([1, 2], ["a"], now=5.0)
    assert index.match([1, 2], 2) == {}


def test_what_is_only_predicted_can_be_left_out() -> None:
    index = PrefixIndex(1000, 10.0)
    for worker in WORKERS[:2]:
        index.add(worker)
    index.hear("a", 1, reset=True, blocks=CHAINS[0][:2], snapshots=CHAINS[0][2:3])
    index.predict(CHAINS[0], ["a", "b"], 0.0, snapshot=5)
    assert index.match(CHAINS[0], 6) == {"a": (6, 5), "b": (6, 5)}
    assert index.match(CHAINS[0], 6, predicted=False) == {"a": (3, 3)}
