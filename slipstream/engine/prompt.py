"""A prompt as the model needs it: positions, which rows are image rows, their embeddings. Knows no schedule and no cache.

T prompt tokens, M image rows, F frames, H x W pixels. A video counts as an image of several frames: Qwen3-VL's groups of frames
are an image each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream import block_hash, cache_keys
from slipstream import positions as mrope_rules
from slipstream.block_hash import PictureRows
from slipstream.checkpoint import Checkpoint, VisionConfig
from slipstream.engine import scoring
from slipstream.engine.scoring import Scores
from slipstream.engine.sequence import GenerationRequest
from slipstream.errors import InvalidRequestError
from slipstream.types import MropeState, PromptLogprobs

Pixels = NDArray[np.uint8]


class Publisher(Protocol):
    """Is told how far a prompt's state is. Called on the engine thread; must not block.

    An exception that it raises fails its request and no other.
    """

    def begin(self, cached_tokens: int) -> None:
        """The scheduler reached the prompt, of which so many tokens are cached: its destination may be asked to get ready."""

    def allocated(self, blocks: tuple[int, ...], state_slot: int | None, cached_tokens: int) -> None:
        """The prompt's rows will lie in this block table and its recurrent states in this slot (None: it has none). KV rows
        [0, cached_tokens) of every layer are final already."""

    def layer_done(self, layer: int, num_tokens: int, last_chunk: bool) -> None:
        """KV rows [0, num_tokens) of `layer` (an index into checkpoint.layers) are final; states are final iff `last_chunk`."""


@dataclass(kw_only=True)
class Prompt:
    """What the engine keeps beside a request. Pixels, positions and embeddings go as soon as the prompt is computed."""

    mrope: MropeState
    tokens: NDArray[np.int64] | None = None
    """[T]; in a resumed request T counts its output so far."""
    positions: NDArray[np.int32] | None = None
    """[T, 3] t, h, w."""
    image_rows: NDArray[np.int64] | None = None
    """[M] rows of T that take an image embedding, ascending."""
    pixels: tuple[Pixels, ...] = ()
    images: tuple[PictureRows, ...] = ()
    """Where each picture lies."""
    embeds: Tensor | None = None
    """[M - embeds_from, E] with deepstack features, made when the first image row is reached that is not cached."""
    embeds_from: int = 0
    """Image rows of the pictures before the first one that was encoded."""
    publisher: Publisher | None = None
    distinct: Tensor | None = None
    """int64 tokens of the prompt, each once; made when a repetition penalty first needs them."""
    scores: list[Scores] | None = None
    """Of the rows computed so far; None: nobody wants them, or they were taken."""

    def image_range(self, start: int, count: int) -> tuple[int, int]:
        """The image rows that lie in tokens [start, start + count): a range of M."""
        if self.image_rows is None:
            return 0, 0
        first, last = np.searchsorted(self.image_rows, (start, start + count))
        return int(first), int(last)

    def pictures_from(self, row: int) -> tuple[Pixels, ...]:
        """Pixels of the pictures that reach token `row` or lie after it; those before it count as encoded."""
        first = sum(image.start + image.count <= row for image in self.images)
        self.embeds_from = sum(image.count for image in self.images[:first])
        return self.pixels[first:]

    def embeddings(self, first: int, last: int) -> Tensor:
        """Of image rows [first, last)."""
        assert self.embeds is not None, "images are encoded before the batch is built"
        return self.embeds[first - self.embeds_from : last - self.embeds_from]

    def add_scores(self, scores: Scores | None) -> None:
        """Of the next rows, in order; None: of none."""
        if scores is not None and self.scores is not None:
            self.scores.append(scores)

    def take_scores(self) -> PromptLogprobs | None:
        """What is told of the prompt's tokens, once, when all rows are computed."""
        scores, self.scores = self.scores, None
        return None if scores is None else scoring.joined(scores)

    def drop_inputs(self) -> None:
        """The prompt is in the caches: only its position state is needed from now on."""
        self.tokens = self.positions = self.image_rows = self.embeds = None
        self.pixels = ()


def prepare(request: GenerationRequest, pixels: Sequence[Pixels], publisher: Publisher | None, checkpoint: Checkpoint,
            sees: bool) -> Prompt:
    """Check the images against the prompt and compute every position, once. `sees`: the model has a vision tower.

    Raises InvalidRequestError naming what disagrees.
    """
    if (request.grids or pixels) and not (sees and checkpoint.vision):
        raise InvalidRequestError("this model is text-only; send the request without images", field="messages")
    tokens_T = np.asarray(request.tokens + request.output, dtype=np.int64)
    if checkpoint.vision is None:
        positions_T3 = np.repeat(np.arange(len(tokens_T), dtype=np.int32)[:, None], 3, axis=1)
        return Prompt(mrope=mrope_rules.mrope_state(positions_T3, 0), tokens=tokens_T, positions=positions_T3,
                      publisher=publisher)
    vision = checkpoint.vision
    _check_pixels(request, pixels, vision)
    positions_T3, delta = mrope_rules.mrope_positions(
        request.tokens, request.grids, image_token_id=checkpoint.image_token_id, video_token_id=checkpoint.video_token_id,
        merge_size=vision.merge_size)
    prompt = len(request.tokens)
    output = np.arange(prompt + delta, len(tokens_T) + delta, dtype=np.int32)  # output is text, whatever its tokens
    positions_T3 = np.concatenate((positions_T3, np.repeat(output[:, None], 3, axis=1)))
    return Prompt(mrope=mrope_rules.mrope_state(positions_T3, delta), tokens=tokens_T, positions=positions_T3,
                  image_rows=mrope_rules.placeholders(request.tokens, checkpoint.image_token_id, checkpoint.video_token_id),
                  pixels=tuple(pixels), images=picture_rows(request, checkpoint), publisher=publisher)


def picture_rows(request: GenerationRequest, checkpoint: Checkpoint) -> tuple[PictureRows, ...]:
    """Where each picture of the prompt lies. Raises InvalidRequestError where placeholders and grids disagree."""
    if not request.grids or checkpoint.vision is None:
        return ()
    merge = checkpoint.vision.merge_size
    mrope_rules.check_images(request.tokens, request.grids, image_token_id=checkpoint.image_token_id,
                             video_token_id=checkpoint.video_token_id, merge_size=merge)
    return cache_keys.picture_rows(
        request.tokens, request.grids, request.images or (b"",) * len(request.grids), merge_size=merge,
        image_token_id=checkpoint.image_token_id, video_token_id=checkpoint.video_token_id)


def block_keys(request: GenerationRequest, checkpoint: Checkpoint, block_size: int) -> list[bytes] | None:
    """Keys of the whole blocks of what is computed before a token is drawn; None for images whose content is not known."""
    if request.grids and not request.images:
        return None
    return block_hash.prompt_keys(request.tokens + request.output, block_size, salt=request.cache_salt,
                                  pictures=picture_rows(request, checkpoint))


def _check_pixels(request: GenerationRequest, pixels: Sequence[Pixels], vision: VisionConfig) -> None:
    if len(pixels) != len(request.grids):
        raise InvalidRequestError(f"{len(request.grids)} image grids and {len(pixels)} images: send one image per grid",
                                  field="messages")
    for number, (image, grid) in enumerate(zip(pixels, request.grids, strict=True)):
        still = (grid.h * vision.patch_size, grid.w * vision.patch_size, 3)
        frames = (grid.t * vision.temporal_patch_size, *still)
        if image.dtype != np.uint8 or image.shape not in ([still, frames] if grid.t == 1 else [frames]):
            raise InvalidRequestError(f"image {number} is {image.dtype} {image.shape}; its grid {grid.t} x {grid.h} x {grid.w} "
                                      f"needs uint8 {still if grid.t == 1 else frames}", field="messages")
