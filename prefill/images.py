"""Pictures on their way to the requests that name them: by content hash, least recently used out first. Knows no model.

Ledger: the store holds at most `limit_bytes`. A picture that a request pinned is never dropped; a request may pin a picture
that has not come yet, and waits for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequestError, RequestTooLargeError, UnavailableError
from slipstream.v1 import worker_pb2 as pb

Pixels = NDArray[np.uint8]


@dataclass(kw_only=True)
class _Entry:
    pixels: Pixels | None = None
    """[H, W, 3]; None: a request waits for it."""
    pins: int = 0
    came: asyncio.Event = field(default_factory=asyncio.Event)


class ImageStore:
    """Lives on the event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.used_bytes = 0

    def __contains__(self, content_hash: bytes) -> bool:
        entry = self._entries.get(content_hash)
        return entry is not None and entry.pixels is not None

    def put(self, content_hash: bytes, pixels: Pixels) -> None:
        """Keep a picture, dropping others that nobody needs. Raises UnavailableError if those in use leave no room."""
        if content_hash in self:
            self._entries.move_to_end(content_hash)
            return
        for name in [name for name, entry in self._entries.items() if not entry.pins and entry.pixels is not None]:
            if self.used_bytes + pixels.nbytes <= self.limit_bytes:
                break
            self._drop(name)
        if self.used_bytes + pixels.nbytes > self.limit_bytes:
            raise UnavailableError(f"no room for a picture of {pixels.nbytes} bytes: requests in progress use "
                                   f"{self.used_bytes} of {self.limit_bytes}", retry_after_seconds=1.0)
        entry = self._entries.setdefault(content_hash, _Entry())
        self._entries.move_to_end(content_hash)
        entry.pixels = pixels
        self.used_bytes += pixels.nbytes
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
        for name in hashes:
            self._entries.move_to_end(name)
        return tuple(entry.pixels for entry in entries if entry.pixels is not None)

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """The request does not need them any more; they stay while there is room."""
        for name in hashes:
            entry = self._entries[name]
            entry.pins -= 1
            assert entry.pins >= 0, "a picture is unpinned once for each pin"
            if not entry.pins and entry.pixels is None:
                del self._entries[name]

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
        name, height, width = b"", 0, 0
        data = bytearray()
        async for chunk in chunks:
            if not name:
                name, height, width = chunk.content_hash, chunk.height, chunk.width
                self._check(height, width)
                if name in self._store:
                    return True
            data += chunk.data
            if len(data) > height * width * 3:
                break
        if not name:
            raise InvalidRequestError("the first ImageChunk must carry a content hash", field="images")
        if len(data) != height * width * 3:
            raise InvalidRequestError(f"a picture of {height} x {width} has {height * width * 3} bytes; "
                                      f"{'more' if len(data) > height * width * 3 else len(data)} came", field="images")
        whole = bytes(data)
        if self._content_hash(height, width, whole) != name:
            raise InvalidRequestError("the picture's bytes do not have the content hash that was announced", field="images")
        self._store.put(name, np.frombuffer(whole, dtype=np.uint8).reshape(height, width, 3))
        return False

    def _check(self, height: int, width: int) -> None:
        if not height or not width or height % self._factor or width % self._factor:
            raise InvalidRequestError(f"a picture's sides must be multiples of {self._factor}, not {height} x {width}; "
                                      "resize it first", field="images")
        if height * width * 3 > self._store.limit_bytes:
            raise RequestTooLargeError(f"a picture of {height} x {width} is larger than transfer.image_store_bytes "
                                       f"({self._store.limit_bytes})", field="images")
