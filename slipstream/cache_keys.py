"""The keys of a prompt's blocks, pictures included: the engine finds blocks by them, the router replicas. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from slipstream import positions
from slipstream.block_hash import PictureRows
from slipstream.types import Grid


def picture_rows(tokens: Sequence[int], grids: Sequence[Grid], hashes: Sequence[bytes], *, image_token_id: int | None,
                 video_token_id: int | None, merge_size: int) -> tuple[PictureRows, ...]:
    """Where each picture of a prompt lies; a hash for each grid. The placeholders agree with the grids."""
    rows = positions.placeholders(tokens, image_token_id, video_token_id)
    found, at = [], 0
    for content_hash, grid in zip(hashes, grids, strict=True):
        count = positions.merged_tokens(grid, merge_size)
        if grid.t > 1 and content_hash:  # the same frames at another rate have other positions
            content_hash += struct.pack("<d", grid.t_step)
        found.append(PictureRows(start=int(rows[at]), count=count, content_hash=content_hash))
        at += count
    return tuple(found)


def short(keys: Sequence[bytes]) -> list[int]:
    """The first 8 bytes of each key, little-endian: enough to route by, since a mix-up of two costs a wrong guess and no wrong
    token."""
    found: list[int] = np.frombuffer(b"".join(keys), dtype="<u8")[::2].tolist()
    return found
