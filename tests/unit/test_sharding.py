"""Which rank holds which heads and layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import checkpoint, sharding
from slipstream.errors import ConfigError
from slipstream.sharding import Geometry, Shard, balance, heads_of, rows_of
from slipstream.types import AttentionLayer


def test_fewer_heads_than_ranks_are_held_by_neighbours() -> None:
    assert [list(heads_of(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(heads_of(4, 2, rank)) for rank in range(2)] == [[0, 1], [2, 3]]


@given(st.integers(1, 300), st.integers(1, 16))
def test_rows_are_covered_once_in_order(rows: int, tp: int) -> None:
    assert [row for rank in range(tp) for row in rows_of(rows, tp, rank)] == list(range(rows))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data(), st.integers(0, 30))
def test_no_other_cut_has_a_cheaper_dearest_stage(costs: list[int], data: st.DataObject, last: int) -> None:
    pp = data.draw(st.integers(1, len(costs)))

    def dearest(lengths: tuple[int, ...]) -> int:
        ends = [sum(lengths[: i + 1]) for i in range(pp)]
        runs = [sum(costs[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
        return max([*runs[:-1], runs[-1] + (last if pp > 1 else 0)])

    found = balance(costs, pp, last=last)
    assert sum(found) == len(costs)
    assert min(found) >= 1

    def cuts(left: int, runs: int) -> list[tuple[int, ...]]:
        if runs == 1:
            return [(left,)]
        return [(first, *rest) for first in range(1, left - runs + 2) for rest in cuts(left - first, runs - 1)]

    assert dearest(found) == min(map(dearest, cuts(len(costs), pp)))


def test_ranks_of_a_stage_are_neighbours() -> None:
    geometry = Geometry(tp=2, stages=(3, 1, 2))
    shards = [Shard(geometry=geometry, rank=rank) for rank in range(geometry.world)]
    assert [(one.stage, one.tp_rank) for one in shards] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [list(one.layers) for one in shards[::2]] == [[0, 1, 2], [3], [4, 5]]
    assert [geometry.stage_of(layer) for layer in range(6)] == [0, 0, 0, 1, 2, 2]


def test_a_geometry_that_cannot_be_is_refused_with_what_can() -> None:
    demo = checkpoint.read(checkpoint.DEMO)
    legal = sharding.legal_tp(demo)
    assert {1, 2} <= set(legal)
    wrong = max(legal) + 1
    with pytest.raises(ConfigError, match=f"tp {wrong} does not cut .* legal: {', '.join(map(str, legal))}"):
        sharding.plan(demo, tp=wrong, pp=1)
    with pytest.raises(ConfigError, match=f"pp must be 1 to {len(demo.layers)}"):
        sharding.plan(demo, tp=1, pp=len(demo.layers) + 1)
    with pytest.raises(ConfigError, match="2 positive numbers"):
        sharding.plan(demo, tp=1, pp=2, stages=[len(demo.layers), 0])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_a_rank_holds_of_a_layer(tp: int) -> None:
    demo = checkpoint.read(checkpoint.DEMO)
    shard = Shard(geometry=sharding.plan(demo, tp=tp, pp=2), rank=tp)
    assert [spec.name for spec in shard.specs(demo.layers)] == [demo.layers[i].name for i in shard.layers]
    for index, spec in zip(shard.layers, shard.specs(demo.layers), strict=True):
        whole = demo.layers[index]
        if isinstance(spec, AttentionLayer):
            assert isinstance(whole, AttentionLayer)
            assert spec.kv_heads == max(1, whole.kv_heads // tp)
