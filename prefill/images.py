"""Pictures on their way to the requests that name them: by content hash, least recently used out first. Knows no model.

Ledger: the store holds at most `limit_bytes`, what is on its way here included: it has room from its first chunk on, in order
of arrival. A picture that a request pinned is never dropped, nor one that came a moment ago: its request may be on its way. A
request may pin a picture that has not come yet, and waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequestError, RequestTooLargeError, UnavailableError
from slipstream.v1 import worker_pb2 as pb

Pixels = NDArray[np.uint8]
ROOM_SECONDS = 10.0
"""Longest wait for room."""
READ_SECONDS = 15.0
"""Longest time from the room for a picture to its last byte."""
FRESH_SECONDS = 2.0
"""How long a picture that was announced waits for its request to pin it."""


@dataclass(kw_only=True)
class _Entry:
    pixels: Pixels | None = None
    """[H, W, 3]; None: a request waits for it."""
    pins: int = 0
    fresh_until: float = 0.0
    """In the event loop's time."""
    came: asyncio.Event = field(default_factory=asyncio.Event)


class ImageStore:
    """Lives on the event loop."""

    def __init__(self, limit_bytes: int, *, room_seconds: float = ROOM_SECONDS, fresh_seconds: float = FRESH_SECONDS) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """By pictures here and on their way."""
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._room_seconds = room_seconds
        self._fresh_seconds = fresh_seconds
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def __contains__(self, content_hash: bytes) -> bool:
        entry = self._entries.get(content_hash)
        return entry is not None and entry.pixels is not None

    def has(self, content_hash: bytes) -> bool:
        """True if the picture is here; it stays for the request that is about to pin it."""
        if content_hash in self:
            self._refresh(content_hash)
        return content_hash in self

    async def reserve(self, count: int) -> None:
        """Take room for a picture of `count` bytes, waiting for it in turn; `put` or `give_back` follows.

        Raises UnavailableError if requests in progress leave none for too long.
        """
        try:
            async with asyncio.timeout(self._room_seconds), self._turn:
                while not self._make_room(count):
                    self._freed.clear()
                    with contextlib.suppress(TimeoutError):  # fresh pictures age without a word
                        await asyncio.wait_for(self._freed.wait(), 0.1)
                self.used_bytes += count
        except TimeoutError as error:
            raise UnavailableError(f"no room for a picture of {count} bytes: requests in progress use {self.used_bytes} of "
                                   f"{self.limit_bytes}", retry_after_seconds=1.0) from error

    def give_back(self, count: int) -> None:
        """The room is not needed."""
        self.used_bytes -= count
        self._freed.set()

    def put(self, content_hash: bytes, pixels: Pixels) -> None:
        """Keep a picture, for which room was reserved."""
        if self.has(content_hash):
            self.give_back(pixels.nbytes)
            return
        entry = self._entries.setdefault(content_hash, _Entry())
        entry.pixels = pixels
        self._refresh(content_hash)
        entry.came.set()

    async def pin(self, hashes: Sequence[bytes], timeout_seconds: float) -> tuple[Pixels, ...]:
        """The pictures, in this order, once all of them are here; `unpin` the same hashes later.

        Raises UnavailableError if one does not come in time; nothing is pinned then, nor when cancelled.
        """
        entries = [self._entries.setdefault(name, _Entry()) for name in hashes]
        for entry in entries:
            entry.pins += 1
        try:
            async with asyncio.timeout(timeout_seconds):
                for entry in entries:
                    await entry.came.wait()
        except TimeoutError as error:
            missing = sum(entry.pixels is None for entry in entries)
            self.unpin(hashes)
            raise UnavailableError(f"{missing} of {len(hashes)} pictures did not come within {timeout_seconds} s; send "
                                   "the request again", retry_after_seconds=1.0) from error
        except asyncio.CancelledError:
            self.unpin(hashes)
            raise
        for name, entry in zip(hashes, entries, strict=True):
            self._entries.move_to_end(name)
            entry.fresh_until = 0.0
        return tuple(entry.pixels for entry in entries if entry.pixels is not None)

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """The request does not need them any more; they stay while there is room."""
        for name in hashes:
            entry = self._entries[name]
            entry.pins -= 1
            assert entry.pins >= 0, "a picture is unpinned once for each pin"
            if not entry.pins and entry.pixels is None:
                del self._entries[name]
        self._freed.set()

    def _refresh(self, name: bytes) -> None:
        self._entries.move_to_end(name)
        self._entries[name].fresh_until = asyncio.get_running_loop().time() + self._fresh_seconds

    def _make_room(self, count: int) -> bool:
        """Drop pictures that nobody needs, as far as necessary; False if that is not enough."""
        now = asyncio.get_running_loop().time()
        for name in [name for name, entry in self._entries.items()
                     if not entry.pins and entry.pixels is not None and entry.fresh_until <= now]:
            if self.used_bytes + count <= self.limit_bytes:
                break
            self._drop(name)
        return self.used_bytes + count <= self.limit_bytes

    def _drop(self, name: bytes) -> None:
        entry = self._entries.pop(name)
        assert entry.pixels is not None, "only whole pictures are dropped"
        assert not entry.pins, "a picture in use stays"
        self.used_bytes -= entry.pixels.nbytes


class ImageIntake:
    """Turns PutImage streams into pictures of the store, trusting nothing that the stream says."""

    def __init__(self, store: ImageStore, factor: int, content_hash: Callable[[int, int, bytes], bytes]) -> None:
        """`factor`: both sides of a picture are multiples of it (patch times merge)."""
        self._store = store
        self._factor = factor
        self._content_hash = content_hash

    async def take(self, chunks: AsyncIterator[pb.ImageChunk]) -> bool:
        """Read one picture; True if it was here already (the stream is not read to its end then).

        Raises InvalidRequestError, RequestTooLargeError or UnavailableError.
        """
        head = await anext(chunks, None)
        if head is None or not head.content_hash:
            raise InvalidRequestError("the first ImageChunk must carry a content hash", field="images")
        shape = self._check(head)
        if self._store.has(head.content_hash):
            return True
        size = math.prod(shape)
        await self._store.reserve(size)
        try:
            async with asyncio.timeout(READ_SECONDS):
                pixels = await self._read(head, chunks, shape)
        except TimeoutError as error:
            self._store.give_back(size)
            raise UnavailableError(f"the picture did not come within {READ_SECONDS} s", retry_after_seconds=1.0) from error
        except BaseException:
            self._store.give_back(size)
            raise
        self._store.put(head.content_hash, pixels)
        return False

    async def _read(self, head: pb.ImageChunk, chunks: AsyncIterator[pb.ImageChunk], shape: tuple[int, ...]) -> Pixels:
        data, size = bytearray(head.data), math.prod(shape)
        while len(data) <= size and (chunk := await anext(chunks, None)) is not None:
            data += chunk.data
        if len(data) != size:
            raise InvalidRequestError(f"a picture of {_named(shape)} has {size} bytes; "
                                      f"{'more' if len(data) > size else len(data)} came", field="images")
        whole = bytes(data)
        if self._content_hash(head.height, head.width, whole) != head.content_hash:
            raise InvalidRequestError("the picture's bytes do not have the content hash that was announced", field="images")
        return np.frombuffer(whole, dtype=np.uint8).reshape(shape)

    def _check(self, head: pb.ImageChunk) -> tuple[int, ...]:
        """The shape that is announced; a single frame would share its name with the still picture."""
        height, width = head.height, head.width
        shape = (head.frames, height, width, 3) if head.frames else (height, width, 3)
        if not height or not width or height % self._factor or width % self._factor:
            raise InvalidRequestError(f"a picture's sides must be multiples of {self._factor}, not {height} x {width}; "
                                      "resize it first", field="images")
        if head.frames == 1:
            raise InvalidRequestError("a video of one frame; send it as a still picture, with frames = 0", field="images")
        if math.prod(shape) > self._store.limit_bytes:
            raise RequestTooLargeError(f"a picture of {_named(shape)} is larger than transfer.image_store_bytes "
                                       f"({self._store.limit_bytes})", field="images")
        return shape


def _named(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape[:-1]))
