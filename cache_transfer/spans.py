"""Spans of memory, [n, 2] of (address, bytes): what a channel moves. Knows no tensor and no owner.

Whoever passes spans here must own what they name: an address that is wrong is not an exception but a crash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from slipstream.errors import ProtocolError

Spans = npt.NDArray[np.uint64]

EMPTY: Spans = np.empty((0, 2), np.uint64)


def of(*pairs: tuple[int, int]) -> Spans:
    """From (address, bytes) pairs."""
    return np.array(pairs, np.uint64).reshape(-1, 2)


def joined(parts: Sequence[Spans]) -> Spans:
    """One after the other; neighbours in memory become one span."""
    if not parts:
        return EMPTY
    spans = parts[0] if len(parts) == 1 else np.concatenate(parts)
    apart = spans[1:, 0] != spans[:-1, 0] + spans[:-1, 1]
    if apart.all():
        return spans
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return np.stack((spans[first, 0], np.add.reduceat(spans[:, 1], first)), 1)


def total(spans: Spans) -> int:
    """Bytes."""
    return int(spans[:, 1].sum())


def paired(ours: Spans, theirs: Spans) -> tuple[Spans, Spans]:
    """The same bytes on both sides, cut so that span i of one is as long as span i of the other.

    Raises ProtocolError unless they are equally many bytes.
    """
    wanted = total(ours)
    if (theirs[:, 1] > wanted).any() or total(theirs) != wanted:  # one by one first: a sum of what a peer says may overflow
        raise ProtocolError(f"spans of {wanted} bytes on one side do not fit those of the other")
    if np.array_equal(ours[:, 1], theirs[:, 1]):
        return ours, theirs
    ends, other = np.cumsum(ours[:, 1]), np.cumsum(theirs[:, 1])
    cuts = np.union1d(ends, other)
    lengths = np.diff(cuts, prepend=np.uint64(0))
    starts = cuts - lengths
    return _cut(ours, ends, starts, lengths), _cut(theirs, other, starts, lengths)


def split(spans: Spans, at: int) -> tuple[Spans, Spans]:
    """The first `at` bytes, and the others."""
    ends = np.cumsum(spans[:, 1])
    starts = np.array([0, at], np.uint64)
    whole = np.union1d(ends, starts[1:])
    whole = whole[whole > 0]
    lengths = np.diff(whole, prepend=np.uint64(0))
    cut = _cut(spans, ends, whole - lengths, lengths)
    first = int(np.searchsorted(whole, at, side="right"))
    return cut[:first], cut[first:]


def _cut(spans: Spans, ends: Spans, starts: Spans, lengths: Spans) -> Spans:
    inside = np.searchsorted(ends, starts, side="right")
    offset = starts - (ends[inside] - spans[inside, 1])
    return np.stack((spans[inside, 0] + offset, lengths), 1)


def checksum(spans: Spans) -> int:
    """XXH3-64 over the bytes as they are in memory now."""
    digest = xxhash.xxh3_64()
    for view in views(spans):
        digest.update(view)
    return digest.intdigest()


def views(spans: Spans) -> Iterator[memoryview]:
    """The memory itself, span by span, to read or to write."""
    for address, length in spans.tolist():
        yield memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def scatter(payload: memoryview, spans: Spans) -> None:
    """Copy a payload into spans. Raises ProtocolError unless it is exactly as long as they are."""
    if len(payload) != total(spans):
        raise ProtocolError(f"a data frame with {len(payload)} payload bytes for ranges of {total(spans)}")
    at = np.frombuffer(payload, np.uint8).ctypes.data
    for address, length in spans.tolist():
        ctypes.memmove(address, at, length)
        at += length


def address_of(array: npt.NDArray[np.uint8]) -> int:
    """Where an array's bytes lie."""
    return int(array.ctypes.data)
