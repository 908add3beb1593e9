"""M-RoPE positions against figures that a person can derive, and against a slow reading of the rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidRequestError
from slipstream.positions import mrope_positions, mrope_state
from slipstream.types import Grid

IMAGE, VIDEO, MERGE = 900, 901, 2


def positions(tokens: list[int], grids: list[Grid]) -> tuple[list[list[int]], int]:
    found, delta = mrope_positions(tokens, grids, image_token_id=IMAGE, video_token_id=VIDEO, merge_size=MERGE)
    assert found.dtype == np.int32
    assert found.shape == (len(tokens), 3)
    return found.tolist(), delta


def grid(rows: int, columns: int) -> Grid:
    """Of merged patches: `rows` x `columns` tokens."""
    return Grid(t=1, h=rows * MERGE, w=columns * MERGE)


def test_text_counts_up_on_every_axis() -> None:
    assert positions([5, 6, 7], []) == ([[0, 0, 0], [1, 1, 1], [2, 2, 2]], 0)


def test_an_image_spreads_and_text_goes_on_after_its_largest_axis() -> None:
    """Four tokens of text, an image of 4 x 6 tokens, three of text: 31 tokens end at position 12 (MR-02)."""
    found, delta = positions([1] * 4 + [IMAGE] * 24 + [1] * 3, [grid(4, 6)])
    assert found[4] == [4, 4, 4]
    assert found[5] == [4, 4, 5]
    assert found[10] == [4, 5, 4]
    assert found[27] == [4, 7, 9]
    assert found[28:] == [[10] * 3, [11] * 3, [12] * 3]
    assert delta == -18
    state = mrope_state(np.array(found, np.int32), delta)
    assert state.last_position == (12, 12, 12)
    assert 31 + delta == 13, "the first decode position (MR-03)"


def test_an_image_may_come_first_and_last() -> None:
    found, delta = positions([IMAGE] * 6, [grid(2, 3)])
    assert found == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert delta == -3


def test_adjacent_images_are_told_apart_by_their_grids() -> None:
    found, delta = positions([IMAGE] * 5, [grid(1, 3), grid(2, 1)])
    assert found[3:] == [[3, 3, 3], [3, 4, 3]]
    assert delta == 0


@pytest.mark.parametrize(("tokens", "grids", "words"), [
    ([1, IMAGE, IMAGE], [grid(1, 3)], "holds 2 image placeholder tokens, its 1 images need 3"),
    ([1, IMAGE, IMAGE], [], "holds 2 image placeholder tokens, its 0 images need 0"),
    ([1, 2], [grid(1, 1)], "holds 0 image placeholder tokens, its 1 images need 1"),
    ([IMAGE, 1, IMAGE], [grid(1, 2)], "interrupted"),
    ([VIDEO, 1], [], "holds 1 image placeholder tokens, its 0 images need 0"),
    ([IMAGE, VIDEO], [grid(1, 2)], "interrupted"),
    ([VIDEO], [Grid(t=1, h=2, w=2, t_step=1e10)], "too long"),
    ([VIDEO], [Grid(t=1, h=2, w=2, t_step=float("nan"))], "too long"),
    ([VIDEO] * 6, [Grid(t=2, h=2, w=2, t_step=5e8)] * 3, "reach beyond"),
    ([IMAGE], [Grid(t=1, h=3, w=2)], "not a multiple of 2"),
    ([IMAGE], [Grid(t=0, h=2, w=2)], "not a multiple"),
])
def test_what_disagrees_is_refused_with_both_counts(tokens: list[int], grids: list[Grid], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        positions(tokens, grids)


@given(st.lists(st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5))), min_size=1, max_size=8))
def test_the_rule_read_slowly(parts: list[int | tuple[int, int]]) -> None:
    tokens: list[int] = []
    grids: list[Grid] = []
    expected: list[list[int]] = []
    origin = 0
    for part in parts:
        if isinstance(part, int):
            tokens += [1] * part
            expected += [[origin + i] * 3 for i in range(part)]
            origin += part
        else:
            rows, columns = part
            tokens += [IMAGE] * (rows * columns)
            grids.append(grid(rows, columns))
            expected += [[origin, origin + r, origin + c] for r in range(rows) for c in range(columns)]
            origin += max(rows, columns)
    assert positions(tokens, grids) == (expected, origin - len(tokens))
