"""What transformers says, in fp32 unless told otherwise: greedy tokens and logits for token ids and resized pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from slipstream import checkpoint as checkpoints

Pixels = NDArray[np.uint8]


@lru_cache(maxsize=8)
def model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint's class."""
    torch.set_num_threads(1)
    kind = getattr(transformers, checkpoints.read(folder).architecture)
    plain = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # the grouped product has no float64
    return kind.from_pretrained(folder, dtype=dtype, **plain).eval()


def inputs(folder: Path, tokens: Sequence[int], pixels: Sequence[Pixels]) -> dict[str, Any]:
    """What its forward takes. A video [F, H, W, 3] is one grid, groups of frames a grid each; time is counted in seconds."""
    ids = torch.tensor([list(tokens)])
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pixels:
        checkpoint = checkpoints.read(folder)
        image = checkpoint.image
        assert image is not None
        processor = Qwen2VLImageProcessorPil(
            do_resize=False, patch_size=image.patch_size, temporal_patch_size=2, merge_size=image.merge_size,
            image_mean=list(image.mean), image_std=list(image.std),
            size={"shortest_edge": image.min_pixels, "longest_edge": image.max_pixels})
        if stills := [item for item in pixels if item.ndim == 3]:
            processed = processor(images=stills, return_tensors="pt", do_resize=False)
            found |= {"pixel_values": processed["pixel_values"], "image_grid_thw": processed["image_grid_thw"]}
        if videos := [patches(folder, item) for item in pixels if item.ndim == 4]:
            found |= {"pixel_values_videos": torch.cat([values for values, _ in videos]),
                      "video_grid_thw": torch.tensor([grid for _, grid in videos])}
        stand = torch.eq(ids, checkpoint.image_token_id or -1), torch.eq(ids, checkpoint.video_token_id or -1)
        found["mm_token_type_ids"] = stand[0].int() + 2 * stand[1].int()
    return found


def patches(folder: Path, video: Pixels) -> tuple[Tensor, list[int]]:
    """[patches, C * t * p * p] and the grid of a video, by transformers' processor, which resizes only with torchvision."""
    image = checkpoints.read(folder).image
    assert image is not None
    nobody: Any = None  # the method does not look at it
    values = (torch.tensor(video).float() / 255 - torch.tensor(image.mean)) / torch.tensor(image.std)
    found, *grid = Qwen3VLVideoProcessor.patchify(nobody, values.permute(0, 3, 1, 2)[None], image.patch_size,
                                                  image.merge_size, 2)
    return torch.as_tensor(found[0]), [int(side) for side in grid]


@torch.no_grad()
def logits(folder: Path, tokens: Sequence[int], pixels: Sequence[Pixels] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, vocab] of a whole prompt."""
    result: Tensor = model(folder, dtype)(**inputs(folder, tokens, pixels)).logits[0]
    return result


@torch.no_grad()
def greedy(folder: Path, tokens: Sequence[int], pixels: Sequence[Pixels] = (), max_new: int = 16,
           stops: Sequence[int] = ()) -> list[int]:
    """Output ids, up to and including the first of `stops`."""
    return step(folder, inputs(folder, tokens, pixels), max_new, stops)


@torch.no_grad()
def step(folder: Path, given: dict[str, Any], max_new: int, stops: Sequence[int] = ()) -> list[int]:
    """Greedy output ids after these inputs.

    The model is stepped over its own cache, where it adds its M-RoPE delta to the length; that agrees with a single pass over
    the whole text. `generate` is not asked: it counts each axis on from the prompt's last token, so that after a prompt that
    ends in an image it stands elsewhere than a single pass, by up to 4.6 in a logit of the demo model (transformers 5.24.0).
    """
    kind = model(folder)
    if hasattr(kind.model, "rope_deltas"):
        kind.model.rope_deltas = None  # else a text would be placed by the last picture's
    state = kind(**given, use_cache=True)
    out = [int(state.logits[0, -1].argmax())]
    while len(out) < max_new and out[-1] not in stops:
        state = kind(input_ids=torch.tensor([[out[-1]]]), cache=state.cache, use_cache=True)
        out.append(int(state.logits[0, -1].argmax()))
    return out
