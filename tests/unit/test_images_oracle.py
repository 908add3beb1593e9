"""Pictures against transformers' processor, and files that are refused before they are decoded."""

from __future__ import annotations

import base64
import io
import random
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as oracle

from slipstream import checkpoint
from slipstream.checkpoint import DEMO, ImageConfig
from slipstream.errors import InvalidRequestError
from slipstream.text import images

CONFIG = checkpoint.read(DEMO).image
assert CONFIG is not None
IMAGE: ImageConfig = CONFIG
LIMIT = 64_000_000


def decode(data: bytes, *, max_pixels: int = LIMIT) -> images.Picture:
    return images.decode(data, IMAGE, max_pixels=max_pixels, field="messages[0].content[0]")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(height: int, width: int, mode: str = "RGB") -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(values if channels > 1 else values[:, :, 0])


@given(
    st.integers(3, 4000),
    st.integers(3, 4000),
    st.sampled_from([28, 32]),
    st.sampled_from([(1024, 1048576), (65536, 16777216), (3136, 1003520)]),
)
@settings(max_examples=500, deadline=None)
def test_sizes_equal_transformers(height: int, width: int, factor: int, limits: tuple[int, int]) -> None:
    if max(height, width) / min(height, width) > 200:
        return
    wanted = oracle.smart_resize(height, width, factor=factor, min_pixels=limits[0], max_pixels=limits[1])
    assert images.smart_resize(height, width, factor, *limits) == wanted


@pytest.mark.parametrize(
    ("height", "width"), [(32, 32), (48, 48), (80, 112), (10, 1000), (26, 28), (332, 27), (15, 16), (1100, 1300), (3, 600)]
)
def test_pixels_equal_transformers(height: int, width: int) -> None:
    image = noise(height, width)
    picture = decode(encoded(image))
    processor = oracle.Qwen2VLImageProcessorPil(
        size={"shortest_edge": IMAGE.min_pixels, "longest_edge": IMAGE.max_pixels},
        patch_size=IMAGE.patch_size,
        merge_size=IMAGE.merge_size,
        temporal_patch_size=2,
        image_mean=IMAGE.mean,
        image_std=IMAGE.std,
    )
    wanted = processor(images=[image], return_tensors="np")
    assert wanted["image_grid_thw"].tolist() == [[picture.grid.t, picture.grid.h, picture.grid.w]]
    grid, patch, merge = picture.grid, IMAGE.patch_size, IMAGE.merge_size
    values = (picture.pixels.astype(np.float32) / 255 - 0.5) / 0.5
    tiles = values.reshape(grid.h // merge, merge, patch, grid.w // merge, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    ours = np.repeat(tiles.reshape(grid.h * grid.w, 3, 1, patch, patch), 2, axis=2).reshape(grid.h * grid.w, -1)
    np.testing.assert_allclose(ours, wanted["pixel_values"], atol=1e-5)


def test_alpha_is_white_and_changes_the_name() -> None:
    """A transparent picture and the same one made opaque differ in pixels, so in name as well."""
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    half = Image.new("RGBA", (64, 64), (255, 0, 0, 128))
    opaque = Image.new("RGBA", (64, 64), (255, 0, 0, 255))
    pictures = [decode(encoded(image)) for image in (clear, half, opaque)]
    assert [tuple(int(v) for v in p.pixels[5, 5]) for p in pictures] == [(255, 255, 255), (255, 127, 127), (255, 0, 0)]
    assert len({p.content_hash for p in pictures}) == 3


def test_names_depend_on_shape_and_every_pixel() -> None:
    values = np.arange(64 * 96 * 3, dtype=np.uint32).astype(np.uint8)
    wide, high = Image.fromarray(values.reshape(64, 96, 3)), Image.fromarray(values.reshape(96, 64, 3))
    changed = values.copy()
    changed[-1] ^= 1
    names = {decode(encoded(image)).content_hash for image in (wide, high, Image.fromarray(changed.reshape(64, 96, 3)))}
    assert len(names) == 3
    assert decode(encoded(wide)).content_hash == decode(encoded(wide, "BMP")).content_hash
    assert all(len(name) == 16 for name in names)


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (64, 32), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 8, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to show
    picture = decode(encoded(image, "PNG", exif=exif))
    assert picture.pixels.shape == (64, 32, 3)
    assert tuple(picture.pixels[0, 16]) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "YCbCr", "F"])
def test_modes(mode: str) -> None:
    kind = "TIFF" if mode in ("F", "YCbCr") else "JPEG" if mode == "CMYK" else "PNG"
    image = Image.fromarray(np.full((64, 64), 65535, np.uint16)) if mode == "I;16" else noise(64, 64).convert(mode)
    data = encoded(image, kind)
    if kind == "TIFF":
        with pytest.raises(InvalidRequestError, match="PNG"):
            decode(data)
        return
    picture = decode(data)
    assert picture.pixels.shape == (64, 64, 3)
    if mode == "I;16":
        assert picture.pixels.min() == 255, "16 bits become 8, white stays white"


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    picture = decode(encoded(Image.fromarray(np.full((64, 64), 0x8000, np.uint16))))
    assert set(np.unique(picture.pixels)) <= {127, 128}


# Refused ---------------------------------------------------------------------------------------------------------------


def png_header(height: int, width: int) -> bytes:
    """A PNG that says its size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("height", "width", "words"),
    [(30000, 30000, "900000000"), (9000, 9000, "9000"), (2, 2, "2x2"), (1, 100, "100"), (1, 10000, "10000"), (5, 1001, "1001")],
)
def test_sizes_that_are_refused_before_decoding(height: int, width: int, words: str) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=words) as caught:
        decode(png_header(height, width))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.field == "messages[0].content[0]"
    assert peak < 8 << 20


@pytest.mark.filterwarnings("error")
def test_a_large_allowed_picture_warns_nobody() -> None:
    with pytest.raises(InvalidRequestError, match="damaged"):
        decode(png_header(10000, 10000), max_pixels=200_000_000)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_files_are_the_users_mistake(kind: str) -> None:
    """Cut or changed anywhere: a picture, or a 400; never another exception."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x9286] = b"note"
    options = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP") else {}
    whole = encoded(noise(40, 40), kind, **options)
    chance, longest = random.Random(7), 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        try:
            picture = images.decode(bytes(data), IMAGE, max_pixels=1_000_000, field="f")
        except InvalidRequestError as refusal:
            longest = max(longest, len(refusal.message))
        else:
            assert picture.pixels.dtype == np.uint8
    assert 0 < longest < 300


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png",
        "https://169.254.169.254/",
        "HTTP://10.0.0.1/x",
        "file:///etc/passwd",
        "ftp://x/y",
        "",
        "data:",
        "data:text/plain;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64,@@@@",
        "data:image/png;base64,AAA",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="data URL") as caught:
        images.from_data_url(url, "messages[0].content[1].image_url")
    assert caught.value.field == "messages[0].content[1].image_url"
    assert len(caught.value.message) < 300


def test_data_urls() -> None:
    payload = base64.b64encode(b"\x00picture\xff").decode()
    for head in ("data:image/png;base64,", "data:image/jpeg;charset=x;base64,", "DATA:image/png;BASE64,"):
        assert images.from_data_url(head + payload, "f") == b"\x00picture\xff"
