"""Broken pictures: bytes of every format changed at random are refused or decoded, never a fault."""

from __future__ import annotations

import io
import random
import warnings

import pytest
from PIL import Image

from slipstream import checkpoint
from slipstream.checkpoint import DEMO
from slipstream.errors import InvalidRequestError
from slipstream.text.images import decode

CONFIG = checkpoint.read(DEMO).image
MODES = {
    "PNG": ("RGB", "RGBA", "P", "L", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P",),
    "BMP": ("RGB", "1"),
}


def encoded(kind: str, mode: str) -> bytes:
    file = io.BytesIO()
    image = Image.new(mode, (24, 17)) if mode == "I;16" else Image.radial_gradient("L").resize((24, 17)).convert(mode)
    exif = Image.Exif()
    exif[274] = 6
    exif[270] = "words"
    image.save(file, kind, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP") else {}))
    return file.getvalue()


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_changed_bytes_never_break_it(kind: str, mode: str) -> None:
    assert CONFIG is not None
    good = encoded(kind, mode)
    decode(good, CONFIG, max_pixels=10_000, field="x")
    chance = random.Random(f"{kind} {mode}")
    refusals = 0
    for _ in range(120):
        data = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(min(len(data), 200))] = chance.choice([0, 1, 255, chance.randrange(256)])
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, about the bytes that were changed
                picture = decode(bytes(data), CONFIG, max_pixels=10_000, field="x")
            assert picture.pixels.shape == (*picture.pixels.shape[:2], 3)
        except InvalidRequestError as error:
            assert error.field == "x"  # noqa: PT017 (decoded is as good as refused)
            refusals += 1
    assert refusals, "the changes changed nothing"
