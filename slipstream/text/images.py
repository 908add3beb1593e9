"""Encoded pictures to resized RGB pixels and their patch grid; knows no prompt.

Limits are checked on the header, before anything is decoded. An alpha channel is composited on white; EXIF orientation is
applied.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from slipstream.block_hash import content_hash
from slipstream.checkpoint import ImageConfig
from slipstream.errors import InvalidRequestError
from slipstream.types import Grid

MAX_ASPECT = 200
MIN_SIDE = 3
"""Pixels; a smaller picture shows nothing, and enlarging it would invent content."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DAMAGE = (OSError, ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, AttributeError, EOFError, struct.error,
           zlib.error)
"""What Pillow raises for broken files, besides errors of its own: its parsers trip over whatever they meet."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture as the model takes it, or a video, or a group of a video's frames."""

    pixels: NDArray[np.uint8]
    """[H, W, 3], both sides multiples of patch * merge; [F, H, W, 3] of a video."""
    grid: Grid
    content_hash: bytes
    """16 bytes over size and pixels."""

    @property
    def is_video(self) -> bool:
        """Its tokens are a video's."""
        return self.pixels.ndim == 4


@dataclass(eq=False, kw_only=True)
class Still:
    """A picture as a request holds it, or a frame of a video."""

    url: str
    field: str
    data: bytes | None = None
    """The picture's file, once it is fetched from elsewhere."""

    def file(self) -> bytes:
        """Its bytes. Raises InvalidRequestError for a URL that is no data URL and was not fetched."""
        return from_data_url(self.url, self.field) if self.data is None else self.data


def from_data_url(url: str, field: str) -> bytes:
    """The bytes of `data:image/...;base64,...`. Raises InvalidRequestError for anything else."""
    if url[:8].lower().startswith(("http://", "https://")):
        raise InvalidRequestError("pictures by http(s) URL are not fetched; send the picture itself as a data URL: "
                                  "data:image/png;base64,...", field=field)
    header, comma, payload = url.partition(",")
    header = header.lower()
    if not comma or not header.startswith("data:image/") or not header.endswith(";base64"):
        raise InvalidRequestError("an image URL must be a data URL: data:image/png;base64,...", field=field)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"the data URL is not valid base64: {error}", field=field) from error


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int, *, frames: int = 1,
                 counted: int = 1) -> tuple[int, int]:
    """(height, width): the nearest multiples of `factor` whose area lies within the limits, aspect kept (Qwen2-VL's rule).

    The limits are those of all `frames`; whether they are kept is asked of `counted` frames (Qwen3-VL's rule).
    """
    high, wide = round(height / factor) * factor, round(width / factor) * factor  # 0 for a thin side, which then grows
    if counted * high * wide > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted * high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        high, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return high, wide


def decode(data: bytes, config: ImageConfig, *, max_pixels: int, field: str,
           take: Callable[[int], None] = lambda size: None) -> Picture:
    """Decode and resize. `max_pixels`: of the picture as it was sent. `take` hears the bytes that the resized pixels will need
    before anything is decoded, and may raise.

    Raises InvalidRequestError for what is no picture, is damaged, too small, too large, or longer than 200 times its width.
    """
    image = opened(data, max_pixels, field)
    high, wide = smart_resize(image.height, image.width, config.factor, config.min_pixels, config.max_pixels)
    take(3 * high * wide)
    rgb = loaded(image, field)
    high, wide = smart_resize(rgb.height, rgb.width, config.factor, config.min_pixels, config.max_pixels)
    return made(resized(rgb, high, wide), config.patch_size)


def made(pixels: NDArray[np.uint8], patch_size: int, *, t: int = 1, t_step: float = 1.0) -> Picture:
    """With grid and name, of resized pixels."""
    high, wide = pixels.shape[-3:-1]
    return Picture(pixels=pixels, grid=Grid(t=t, h=high // patch_size, w=wide // patch_size, t_step=t_step),
                   content_hash=content_hash(high, wide, pixels.tobytes()))


def resized(rgb: Image.Image, high: int, wide: int) -> NDArray[np.uint8]:
    """[H, W, 3]."""
    if (rgb.width, rgb.height) != (wide, high):
        rgb = rgb.resize((wide, high), Image.Resampling.BICUBIC)
    return np.array(rgb, dtype=np.uint8)


def opened(data: bytes, max_pixels: int, field: str) -> Image.Image:
    """A picture whose header is good, not decoded yet. Raises InvalidRequestError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit comes below, before decoding
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:  # Pillow's own limit, twice its warning's; it names the number of pixels
        raise InvalidRequestError(f"the picture is too large; the limit is {max_pixels} pixels in all ({error})",
                                  field=field) from error
    except _DAMAGE as error:
        raise InvalidRequestError(f"not a picture that can be read; send one of {', '.join(_FORMATS)}", field=field) from error
    _check_size(image.height, image.width, max_pixels, field)
    return image


def loaded(image: Image.Image, field: str) -> Image.Image:
    """Upright and opaque RGB. Raises InvalidRequestError for a damaged picture."""
    try:
        return _rgb(ImageOps.exif_transpose(image))
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        raise InvalidRequestError(f"the picture is damaged: {error}", field=field) from error


def _check_size(height: int, width: int, max_pixels: int, field: str) -> None:
    if min(height, width) < MIN_SIDE:
        raise InvalidRequestError(f"the picture is {width}x{height} pixels; both sides must have at least {MIN_SIDE}",
                                  field=field)
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidRequestError(f"the picture is {width}x{height} pixels; one side may be at most {MAX_ASPECT} times another",
                                  field=field)
    if height * width > max_pixels:
        raise InvalidRequestError(f"the picture is {width}x{height} pixels; the limit is {max_pixels} in all", field=field)


def _rgb(image: Image.Image) -> Image.Image:
    """Opaque RGB; what is transparent shows white."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):  # Pillow would clip instead of scale
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")
