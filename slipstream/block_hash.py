"""Content hashes that are equal in every process and on every machine. Pure; knows no pool and no picture format.

A block's key names everything that its keys and values depend on: the salt, every token before it and in it, and the content of
each picture. Two blocks of the same key are interchangeable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(frozen=True, kw_only=True)
class PictureRows:
    """Where a picture's placeholder tokens lie in a prompt."""

    start: int
    count: int
    content_hash: bytes


def content_hash(height: int, width: int, pixels: bytes | memoryview) -> bytes:
    """16 bytes that name a picture: XXH3-128 over its size and its uint8 RGB pixels, row major.

    The size counts, so that a picture and one of transposed shape with the same bytes differ.
    """
    digest = xxhash.xxh3_128(height.to_bytes(8, "little") + width.to_bytes(8, "little"))
    digest.update(pixels)
    return digest.digest()


def root(salt: str) -> bytes:
    """What the first block's key is chained to. Prompts of different salts share no key."""
    return xxhash.xxh3_128_digest(b"slipstream block 1\0" + salt.encode())


def extend(parent: bytes, tokens: Sequence[int], pictures: bytes = b"") -> bytes:
    """The 16-byte key of the block with these tokens after the block of key `parent`."""
    data = np.asarray(tokens, dtype="<u4").tobytes()
    return xxhash.xxh3_128_digest(parent + len(data).to_bytes(4, "little") + data + pictures)


def prompt_keys(tokens: Sequence[int], block_size: int, *, salt: str = "", pictures: Sequence[PictureRows] = ()) -> list[bytes]:
    """Keys of the whole blocks of a prompt; a partial block has none. `pictures` in prompt order."""
    keys: list[bytes] = []
    parent, first = root(salt), 0
    data, length = np.asarray(tokens, dtype="<u4").tobytes(), (4 * block_size).to_bytes(4, "little")
    for start in range(0, len(tokens) - block_size + 1, block_size):
        end = start + block_size
        while first < len(pictures) and pictures[first].start + pictures[first].count <= start:
            first += 1
        inside = b""
        for picture in pictures[first:]:
            if picture.start >= end:
                break
            inside += (start - picture.start).to_bytes(8, "little", signed=True) + picture.content_hash
        parent = xxhash.xxh3_128_digest(parent + length + data[4 * start : 4 * end] + inside)  # as `extend`, for all at once
        keys.append(parent)
    return keys
