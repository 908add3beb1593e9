"""Content hashes that are equal in every process and on every machine. Pure; knows no pool and no picture format."""

from __future__ import annotations

import xxhash


def content_hash(height: int, width: int, pixels: bytes | memoryview) -> bytes:
    """16 bytes that name a picture: XXH3-128 over its size and its uint8 RGB pixels, row major.

    The size counts, so that a picture and one of transposed shape with the same bytes differ.
    """
    digest = xxhash.xxh3_128(height.to_bytes(8, "little") + width.to_bytes(8, "little"))
    digest.update(pixels)
    return digest.digest()
