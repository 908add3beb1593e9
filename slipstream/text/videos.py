"""A video, sent as frames, to groups of resized RGB frames and their times; knows no prompt and no video file.

The frames are what the model sees: nobody samples them again. A group has `temporal_patch_size` frames, which share their
tokens; the last frame is repeated until the last group is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.checkpoint import ImageConfig, VideoConfig
from slipstream.errors import InvalidRequestError
from slipstream.text.images import Picture, Still, loaded, made, opened, resized, smart_resize

DEFAULT_FPS = 2.0
"""Of frames that come without fps and timestamps; what Qwen samples at."""


@dataclass(frozen=True, kw_only=True)
class Frames:
    """A video as a request holds it."""

    stills: tuple[Still, ...]
    """In order, at least two."""
    seconds: tuple[float, ...]
    """When each frame was; strictly ascending."""
    field: str


def stamps(video: Frames, config: VideoConfig) -> list[str]:
    """The text before each group of frames: the mean of its first and last frame's time."""
    size = config.temporal_patch_size
    seconds = [*video.seconds, *[video.seconds[-1]] * (-len(video.seconds) % size)]
    return [f"<{(seconds[i] + seconds[i + size - 1]) / 2:.1f} seconds>" for i in range(0, len(seconds), size)]


def frame_size(frames: int, height: int, width: int, image: ImageConfig, config: VideoConfig) -> tuple[int, int]:
    """(height, width) that each frame is resized to."""
    if not config.timestamps:
        return smart_resize(height, width, image.factor, config.min_pixels, config.max_pixels)
    if min(height, width) < image.factor:
        scale = max(image.factor / height, image.factor / width)
        height, width = int(height * scale), int(width * scale)
    counted = round(frames / config.temporal_patch_size) * config.temporal_patch_size
    return smart_resize(height, width, image.factor, config.min_pixels, config.max_pixels, frames=frames, counted=counted)


def decode(video: Frames, image: ImageConfig, config: VideoConfig, *, max_pixels: int,
           take: Callable[[int], None] = lambda size: None) -> list[Picture]:
    """One Picture for each group of frames, or one of the whole video where the model has no timestamps.

    `max_pixels`: of each frame as it was sent. `take` hears the bytes of each group's resized pixels before they are made, and
    may raise. Raises InvalidRequestError naming the frame that is no picture, is damaged, or is not as large as the first.
    """
    whole: list[NDArray[np.uint8]] = []
    group = config.temporal_patch_size
    for number, still in enumerate(video.stills):
        rgb = loaded(opened(still.file(), max_pixels, still.field), still.field)
        if not whole:
            size = rgb.size
            high, wide = frame_size(len(video.stills), rgb.height, rgb.width, image, config)
        if rgb.size != size:
            raise InvalidRequestError(f"frame {number} is {rgb.width}x{rgb.height} pixels, the first {size[0]}x{size[1]}: all "
                                      "frames of a video must be of one size", field=still.field)
        if number % group == 0:
            take(3 * high * wide * group)
        whole.append(resized(rgb, high, wide))
    pixels = np.stack([*whole, *[whole[-1]] * (-len(whole) % group)])
    if config.timestamps:
        return [made(pixels[i:i + group], image.patch_size) for i in range(0, len(pixels), group)]
    interval = (video.seconds[-1] - video.seconds[0]) / (len(video.seconds) - 1)
    step = np.float32(config.tokens_per_second) * np.float32(group * interval) if config.tokens_per_second else 1.0
    return [made(pixels, image.patch_size, t=len(pixels) // group, t_step=float(step))]
