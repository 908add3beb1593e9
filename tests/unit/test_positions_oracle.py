"""M-RoPE positions against transformers' get_rope_index, for the rule of every family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

from slipstream.positions import mrope_positions
from slipstream.types import Grid

TEXT, IMAGE, VIDEO, MERGE = 1, 900, 901, 2
ONE_GRID = [Qwen2VLModel, Qwen2_5_VLModel]
"""A video is one grid, whose t axis counts time."""
BY_GROUP = [Qwen3VLModel, Qwen3VLMoeModel, Qwen3_5Model, Qwen3_5MoeModel]
"""A video is a grid for each group of frames, each behind its timestamp."""
TOKENS_PER_SECOND = 2

SIDE = st.integers(1, 6)
Part = int | tuple[int, int]
"""So many tokens of text, or a picture of so many rows and columns of tokens."""


def grid(rows: int, columns: int, t: int = 1, step: float = 1.0) -> Grid:
    return Grid(t=t, h=rows * MERGE, w=columns * MERGE, t_step=step)


def ours(tokens: list[int], grids: list[Grid]) -> tuple[np.ndarray[Any, Any], int]:
    return mrope_positions(tokens, grids, image_token_id=IMAGE, video_token_id=VIDEO, merge_size=MERGE)


def theirs(kind: Any, tokens: list[int], images: list[Grid], videos: list[Grid] | None = None,
           seconds: list[float] | None = None) -> tuple[np.ndarray[Any, Any], int]:
    """`videos` as the processor lists them: one grid each."""
    ids = torch.tensor([tokens])

    def table(grids: list[Grid]) -> torch.Tensor | None:
        return torch.tensor([[one.t, one.h, one.w] for one in grids]) if grids else None

    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=TOKENS_PER_SECOND, temporal_patch_size=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision),
                            get_vision_position_ids=lambda *a, **k: kind.get_vision_position_ids(None, *a, **k))
    extra = {"second_per_grid_ts": torch.tensor(seconds, dtype=torch.float32)} if seconds else {}
    found, delta = kind.get_rope_index(
        model, ids, mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(), image_grid_thw=table(images),
        video_grid_thw=table(videos or []), attention_mask=torch.ones_like(ids), **extra)
    return found[:, 0].T.numpy(), int(delta)


def agree(kind: Any, parts: list[Part]) -> None:
    """Pictures side by side would be one to transformers: here text is between, as vision_start and vision_end always are."""
    tokens: list[int] = []
    grids: list[Grid] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [TEXT] * part
            continue
        if tokens and tokens[-1] == IMAGE:
            tokens.append(TEXT)
        grids.append(grid(*part))
        tokens += [IMAGE] * (part[0] * part[1])
    found, delta = ours(tokens, grids)
    wanted, wanted_delta = theirs(kind, tokens, grids)
    np.testing.assert_array_equal(found, wanted)
    assert delta == wanted_delta
    assert len(tokens) + delta == wanted.max() + 1, "where output begins"


CASES: dict[str, list[Part]] = {
    "text": [17], "one token": [1], "one image": [5, (4, 6), 3], "image first": [(3, 2), 5], "image last": [5, (2, 7)],
    "only an image": [(4, 4)], "several": [2, (2, 3), 1, (5, 1), 4, (1, 1), 9], "wide": [3, (1, 200), 3],
    "tall": [3, (200, 1), 3],
    "beyond 32k": [40_000, (6, 4), 30, (2, 9), 5], "image at the edge of 32k": [32_760, (8, 8), 5]}


@pytest.mark.parametrize("kind", ONE_GRID + BY_GROUP)
@pytest.mark.parametrize("name", CASES)
def test_pictures(kind: Any, name: str) -> None:
    agree(kind, CASES[name])


@given(st.lists(st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 12), st.integers(1, 12))), min_size=1, max_size=9),
       st.sampled_from(ONE_GRID + BY_GROUP))
@settings(max_examples=150, deadline=None)
def test_any_prompt_of_pictures(parts: list[Part], kind: Any) -> None:
    agree(kind, parts)


@pytest.mark.parametrize("kind", BY_GROUP)
@given(groups=st.integers(1, 6), rows=SIDE, columns=SIDE, stamps=st.integers(1, 9), tail=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_a_video_is_a_grid_for_each_group_of_frames(kind: Any, groups: int, rows: int, columns: int, stamps: int,
                                                    tail: int) -> None:
    """Transformers is given one grid for the video, and takes it apart itself (MR-12)."""
    picture = [TEXT, TEXT] + [IMAGE] * 6
    tokens = picture + ([TEXT] * stamps + [VIDEO] * (rows * columns)) * groups + [TEXT] * tail
    found, delta = ours(tokens, [grid(2, 3), *[grid(rows, columns)] * groups])
    wanted, wanted_delta = theirs(kind, tokens, [grid(2, 3)], [grid(rows, columns, groups)])
    np.testing.assert_array_equal(found, wanted)
    assert delta == wanted_delta


def test_two_frames_by_hand() -> None:
    """Five of text, a frame of 2x3, a timestamp of six, a frame, two of text (MR-12)."""
    found, delta = ours([TEXT] * 5 + [VIDEO] * 6 + [TEXT] * 6 + [VIDEO] * 6 + [TEXT] * 2, [grid(2, 3)] * 2)
    assert found[5:11].tolist() == [[5, 5 + h, 5 + w] for h in range(2) for w in range(3)]
    assert found[11:17, 0].tolist() == list(range(8, 14))
    assert found[17].tolist() == [14] * 3
    assert found[-1].tolist() == [18] * 3
    assert delta == -6


@given(groups=st.integers(1, 60), rows=SIDE, columns=SIDE, fps=st.sampled_from([0.1, 0.5, 1, 2, 3, 12, 24, 29.97]),
       tail=st.integers(1, 5))
@example(groups=12, rows=1, columns=1, fps=40 / 7, tail=1)  # 10 * 0.7 is 7 in float32 alone
@settings(max_examples=100, deadline=None)
def test_qwen2_5_counts_time(groups: int, rows: int, columns: int, fps: float, tail: int) -> None:
    """The video as transformers places it; what follows, one after its largest position on any axis (transformers lets it
    overlap with a long video)."""
    tokens = [TEXT] * 4 + [VIDEO] * (groups * rows * columns) + [TEXT] * tail
    seconds = 2 / fps
    found, delta = ours(tokens, [grid(rows, columns, groups, float(np.float32(TOKENS_PER_SECOND) * np.float32(seconds)))])
    wanted, _ = theirs(Qwen2_5_VLModel, tokens, [], [grid(rows, columns, groups)], [seconds])
    np.testing.assert_array_equal(found[:-tail], wanted[:-tail])
    start = int(wanted[:-tail].max()) + 1
    assert found[-tail:].tolist() == [[start + i] * 3 for i in range(tail)]
    assert len(tokens) + delta == start + tail


def test_qwen2_counts_groups_and_long_videos_push_the_text_behind_them() -> None:
    """Six groups of 2x2 tokens: transformers would put the text at 6, inside the video."""
    tokens = [TEXT] * 4 + [VIDEO] * 24 + [TEXT] * 2
    found, _ = ours(tokens, [grid(2, 2, 6)])
    wanted, _ = theirs(Qwen2VLModel, tokens, [], [grid(2, 2, 6)])
    np.testing.assert_array_equal(found[:-2], wanted[:-2])
    assert found[-2:].tolist() == [[10] * 3, [11] * 3]
    assert wanted[-2].tolist() == [6] * 3
