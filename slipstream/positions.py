"""M-RoPE positions from tokens and image grids; knows no tensor and no request.

An image of t x h x w patches takes t * (h / merge) * (w / merge) placeholder tokens. Text advances all three axes together;
an image's tokens share the axis origin of the text before it and spread along t, h, w; what follows starts one after the
largest position on any axis. Video placeholders are refused for now.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequestError
from slipstream.types import Grid, MropeState

Positions = NDArray[np.int32]


def merged_tokens(grid: Grid, merge_size: int) -> int:
    """Placeholder tokens of one image."""
    return grid.t * (grid.h // merge_size) * (grid.w // merge_size)


def check_images(tokens: Sequence[int], grids: Sequence[Grid], *, image_token_id: int | None,
                 video_token_id: int | None, merge_size: int) -> None:
    """Raise InvalidRequestError, with both counts, unless every placeholder token belongs to exactly one grid."""
    if video_token_id is not None and video_token_id in tokens:
        raise InvalidRequestError("the prompt holds video placeholder tokens; video input is not supported")
    found = sum(token == image_token_id for token in tokens) if image_token_id is not None else 0
    for number, grid in enumerate(grids):
        if min(grid.t, grid.h, grid.w) < 1 or grid.h % merge_size or grid.w % merge_size:
            raise InvalidRequestError(f"image {number}: a grid of {grid.t}x{grid.h}x{grid.w} patches is not a multiple of "
                                      f"{merge_size} in height and width")
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
    ids = np.asarray(tokens, np.int64)
    row, origin = 0, 0
    images = iter(grids)
    placeholders = np.flatnonzero(ids == image_token_id) if grids else np.empty(0, np.int64)
    seen = 0
    while row < total:
        next_image = int(placeholders[seen]) if seen < len(placeholders) else total
        if next_image > row:
            text = next_image - row
            positions[row:next_image] = np.arange(origin, origin + text, dtype=np.int32)[:, None]
            row, origin = next_image, origin + text
            continue
        grid = next(images)
        t, h, w = grid.t, grid.h // merge_size, grid.w // merge_size
        count = t * h * w
        if int(placeholders[seen + count - 1]) != row + count - 1:
            raise InvalidRequestError(f"the placeholder tokens of the image at token {row} are interrupted by other tokens")
        axes = np.indices((t, h, w), dtype=np.int32).reshape(3, count).T
        positions[row:row + count] = axes + origin
        row, origin, seen = row + count, origin + max(t, h, w), seen + count
    return positions, origin - total


def mrope_state(positions: Positions, delta: int) -> MropeState:
    """What travels to decode. `positions` are those of the whole prompt, [T, 3]."""
    t, h, w = (int(axis) for axis in positions[-1])
    return MropeState(delta=delta, last_position=(t, h, w))
