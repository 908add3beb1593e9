"""M-RoPE positions from tokens and grids of pictures and videos; knows no tensor and no request.

A grid of t x h x w patches takes t * (h / merge) * (w / merge) placeholder tokens. Text advances all three axes together; the
placeholders of a grid share the axis origin of the text before it and spread along t, h, w; what follows starts one after the
largest position on any axis. Qwen3-VL and Qwen3.5 show a video as one grid for each group of frames, with text between;
Qwen2-VL and Qwen2.5-VL as one grid whose t axis counts time (transformers lets the text after it overlap it; vLLM does not).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequestError
from slipstream.types import Grid, MropeState

Positions = NDArray[np.int32]
MAX_POSITION = 1 << 30
"""A video of few frames over a long time could reach beyond int32."""


def merged_tokens(grid: Grid, merge_size: int) -> int:
    """Placeholder tokens of one grid."""
    return grid.t * (grid.h // merge_size) * (grid.w // merge_size)


def placeholders(tokens: Sequence[int], image_token_id: int | None, video_token_id: int | None) -> NDArray[np.int64]:
    """Rows of the tokens that stand for pictures and videos, ascending."""
    ids = np.asarray(tokens, np.int64)
    return np.flatnonzero(np.isin(ids, [-1 if known is None else known for known in (image_token_id, video_token_id)]))


def check_images(tokens: Sequence[int], grids: Sequence[Grid], *, image_token_id: int | None,
                 video_token_id: int | None, merge_size: int) -> None:
    """Raise InvalidRequestError, with both counts, unless every placeholder token belongs to exactly one grid."""
    for number, grid in enumerate(grids):
        if min(grid.t, grid.h, grid.w) < 1 or grid.h % merge_size or grid.w % merge_size:
            raise InvalidRequestError(f"image {number}: a grid of {grid.t}x{grid.h}x{grid.w} patches is not a multiple of "
                                      f"{merge_size} in height and width")
        if not 0 <= grid.t * grid.t_step < MAX_POSITION:
            raise InvalidRequestError(f"video {number}: {grid.t} groups of frames {grid.t_step:g} positions apart are too long")
    found = len(placeholders(tokens, image_token_id, video_token_id))
    wanted = sum(merged_tokens(grid, merge_size) for grid in grids)
    if found != wanted:
        raise InvalidRequestError(f"the prompt holds {found} image placeholder tokens, its {len(grids)} images need {wanted}")


def mrope_positions(tokens: Sequence[int], grids: Sequence[Grid], *, image_token_id: int | None, video_token_id: int | None,
                    merge_size: int) -> tuple[Positions, int]:
    """([T, 3] int32, delta) of a whole prompt; output token i sits at `T + i + delta` on every axis.

    Raises InvalidRequestError where placeholders and grids disagree.
    """
    check_images(tokens, grids, image_token_id=image_token_id, video_token_id=video_token_id, merge_size=merge_size)
    total = len(tokens)
    positions = np.empty((total, 3), np.int32)
    row, origin, seen = 0, 0, 0
    marked = placeholders(tokens, image_token_id, video_token_id)
    for grid in grids:
        text = int(marked[seen]) - row
        positions[row:row + text] = np.arange(origin, origin + text, dtype=np.int32)[:, None]
        row, origin = row + text, origin + text
        count = merged_tokens(grid, merge_size)
        if int(marked[seen + count - 1]) != row + count - 1 or len(set(tokens[row:row + count])) > 1:
            raise InvalidRequestError(f"the placeholder tokens of the image at token {row} are interrupted by other tokens")
        axes = np.indices((grid.t, grid.h // merge_size, grid.w // merge_size)).reshape(3, count).T
        axes[:, 0] = axes[:, 0].astype(np.float32) * np.float32(grid.t_step)  # in float32, as transformers counts
        positions[row:row + count] = axes + origin
        row, origin, seen = row + count, origin + int(axes.max()) + 1, seen + count
        if origin > MAX_POSITION:
            raise InvalidRequestError(f"the videos reach beyond position {MAX_POSITION}; send fewer or shorter ones")
    positions[row:] = np.arange(origin, origin + total - row, dtype=np.int32)[:, None]
    return positions, origin - row


def mrope_state(positions: Positions, delta: int) -> MropeState:
    """What travels to decode. `positions` are those of the whole prompt, [T, 3]."""
    t, h, w = (int(axis) for axis in positions[-1])
    return MropeState(delta=delta, last_position=(t, h, w))
