"""prefill.images: what is kept, what is dropped, what waits, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from numpy.typing import NDArray

from prefill.images import ImageIntake, ImageStore
from slipstream.block_hash import content_hash
from slipstream.errors import InvalidRequestError, RequestTooLargeError, UnavailableError
from slipstream.v1 import worker_pb2 as pb

SIDE = 32
BYTES = SIDE * SIDE * 3


def picture(value: int, height: int = SIDE, width: int = SIDE) -> NDArray[np.uint8]:
    return np.full((height, width, 3), value, dtype=np.uint8)


def name(value: int) -> bytes:
    return content_hash(SIDE, SIDE, picture(value).tobytes())


async def put(store: ImageStore, value: int) -> None:
    await store.reserve(BYTES)
    store.put(name(value), picture(value))


async def test_the_least_recently_used_goes_first() -> None:
    store = ImageStore(2 * BYTES, fresh_seconds=0.0)
    await put(store, 0)
    await put(store, 1)
    store.unpin([name(0)] if await store.pin([name(0)], 1) else [])
    await put(store, 2)
    assert (name(0) in store, name(1) in store, name(2) in store) == (True, False, True)
    assert store.used_bytes == 2 * BYTES


async def test_a_pinned_picture_stays_and_a_full_store_refuses() -> None:
    store = ImageStore(BYTES, room_seconds=0.02, fresh_seconds=0.0)
    await put(store, 0)
    await store.pin([name(0)], 1)
    with pytest.raises(UnavailableError, match="no room"):
        await put(store, 1)
    store.unpin([name(0)])
    await put(store, 1)
    assert name(0) not in store


async def test_a_request_may_come_before_its_pictures() -> None:
    store = ImageStore(4 * BYTES, fresh_seconds=0.0)
    waiting = asyncio.create_task(store.pin([name(1), name(0), name(1)], 5))
    await asyncio.sleep(0)
    await put(store, 0)
    await put(store, 1)
    got = await waiting
    assert [int(pixels[0, 0, 0]) for pixels in got] == [1, 0, 1]
    store.unpin([name(1), name(0), name(1)])


async def test_a_picture_that_never_comes_is_an_error_and_leaves_nothing() -> None:
    store = ImageStore(BYTES, fresh_seconds=0.0)
    await put(store, 0)
    with pytest.raises(UnavailableError, match="1 of 2 pictures"):
        await store.pin([name(0), name(1)], 0.01)
    await put(store, 2)  # needs the room of 0, so 0 is not pinned any more
    waiting = asyncio.create_task(store.pin([name(3)], 5))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert list(store._entries) == [name(2)]


async def test_room_is_given_in_turn_and_not_that_of_a_picture_whose_request_is_on_its_way() -> None:
    store = ImageStore(2 * BYTES, fresh_seconds=0.3)
    await put(store, 0)
    await put(store, 1)
    waiting = [asyncio.create_task(put(store, value)) for value in (2, 3, 4)]
    await asyncio.sleep(0.15)
    assert (name(0) in store, name(1) in store) == (True, True), "nobody has pinned them yet"
    await store.pin([name(0)], 1)
    async with asyncio.timeout(5):
        await waiting[0]
    assert (name(0) in store, name(1) in store, name(2) in store) == (True, False, True)
    await store.pin([name(2)], 1)
    store.unpin([name(2)])
    async with asyncio.timeout(0.1):
        await waiting[1]
    assert not waiting[2].done()
    waiting[2].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert store.used_bytes == 2 * BYTES


def chunks(*parts: pb.ImageChunk) -> AsyncIterator[pb.ImageChunk]:
    async def stream() -> AsyncIterator[pb.ImageChunk]:
        for part in parts:
            yield part

    return stream()


async def test_intake_takes_a_picture_in_pieces() -> None:
    store = ImageStore(4 * BYTES)
    intake = ImageIntake(store, SIDE, content_hash)
    data = np.arange(BYTES, dtype=np.uint32).astype(np.uint8).reshape(SIDE, SIDE, 3)
    header = pb.ImageChunk(content_hash=content_hash(SIDE, SIDE, data.tobytes()), height=SIDE, width=SIDE, data=b"")
    raw = data.tobytes()
    assert not await intake.take(chunks(header, pb.ImageChunk(data=raw[:1000]), pb.ImageChunk(data=raw[1000:])))
    (stored,) = await store.pin([header.content_hash], 1)
    assert (stored == data).all()
    assert await intake.take(chunks(header)), "it is here already: the rest is not needed"


@pytest.mark.parametrize(("height", "width", "data", "message"), [
    (SIDE, SIDE, BYTES - 1, "has 3072 bytes; 3071 came"),
    (SIDE, SIDE, BYTES + 1, "more came"),
    (SIDE, SIDE, BYTES, "do not have the content hash"),
    (SIDE + 1, SIDE, BYTES, "multiples of 32"),
    (0, SIDE, 0, "multiples of 32"),
])
async def test_intake_trusts_nothing(height: int, width: int, data: int, message: str) -> None:
    store = ImageStore(4 * BYTES)
    chunk = pb.ImageChunk(content_hash=b"x" * 16, height=height, width=width, data=bytes(data))
    with pytest.raises(InvalidRequestError, match=message):
        await ImageIntake(store, SIDE, content_hash).take(chunks(chunk))
    assert store.used_bytes == 0


async def test_intake_takes_the_frames_of_a_video() -> None:
    store = ImageStore(4 * BYTES)
    intake = ImageIntake(store, SIDE, content_hash)
    data = np.arange(2 * BYTES, dtype=np.uint32).astype(np.uint8).reshape(2, SIDE, SIDE, 3)
    chunk = pb.ImageChunk(content_hash=content_hash(SIDE, SIDE, data.tobytes()), height=SIDE, width=SIDE, frames=2,
                          data=data.tobytes())
    assert not await intake.take(chunks(chunk))
    (stored,) = await store.pin([chunk.content_hash], 1)
    assert stored.shape == data.shape
    assert (stored == data).all()
    chunk.frames = 5
    with pytest.raises(RequestTooLargeError, match=r"5 x 32 x 32 is larger"):
        await intake.take(chunks(chunk))
    chunk.frames = 1
    with pytest.raises(InvalidRequestError, match="a video of one frame"):
        await intake.take(chunks(chunk))


async def test_a_picture_that_stops_on_its_way_holds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill.images.READ_SECONDS", 0.02)
    store = ImageStore(4 * BYTES)

    async def stalls() -> AsyncIterator[pb.ImageChunk]:
        yield pb.ImageChunk(content_hash=b"x" * 16, height=SIDE, width=SIDE)
        assert store.used_bytes == BYTES
        await asyncio.Event().wait()

    with pytest.raises(UnavailableError, match="did not come"):
        await ImageIntake(store, SIDE, content_hash).take(stalls())
    assert store.used_bytes == 0


async def test_intake_refuses_what_could_never_fit() -> None:
    chunk = pb.ImageChunk(content_hash=b"x" * 16, height=1 << 16, width=1 << 16)
    with pytest.raises(RequestTooLargeError, match="image_store_bytes"):
        await ImageIntake(ImageStore(BYTES), SIDE, content_hash).take(chunks(chunk))
    with pytest.raises(InvalidRequestError, match="content hash"):
        await ImageIntake(ImageStore(BYTES), SIDE, content_hash).take(chunks())


def test_transposed_pictures_have_different_hashes() -> None:
    assert content_hash(32, 64, bytes(6144)) != content_hash(64, 32, bytes(6144))
