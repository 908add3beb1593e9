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

from slipstream import checkpoint as checkpoints

Pixels = NDArray[np.uint8]


@lru_cache(maxsize=8)
def _model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    torch.set_num_threads(1)
    kind = getattr(transformers, checkpoints.read(folder).architecture)
    plain = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # the grouped product has no float64
    return kind.from_pretrained(folder, dtype=dtype, **plain).eval()


def _inputs(folder: Path, tokens: Sequence[int], pixels: Sequence[Pixels]) -> dict[str, Any]:
    ids = torch.tensor([list(tokens)])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pixels:
        checkpoint = checkpoints.read(folder)
        image = checkpoint.image
        assert image is not None
        processor = Qwen2VLImageProcessorPil(
            do_resize=False, patch_size=image.patch_size, temporal_patch_size=2, merge_size=image.merge_size,
            image_mean=list(image.mean), image_std=list(image.std),
            size={"shortest_edge": image.min_pixels, "longest_edge": image.max_pixels})
        processed = processor(images=list(pixels), return_tensors="pt", do_resize=False)
        inputs |= {"pixel_values": processed["pixel_values"], "image_grid_thw": processed["image_grid_thw"],
                   "mm_token_type_ids": torch.eq(ids, checkpoint.image_token_id or -1).int()}
    return inputs


@torch.no_grad()
def logits(folder: Path, tokens: Sequence[int], pixels: Sequence[Pixels] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, vocab] of a whole prompt."""
    result: Tensor = _model(folder, dtype)(**_inputs(folder, tokens, pixels)).logits[0]
    return result


@torch.no_grad()
def greedy(folder: Path, tokens: Sequence[int], pixels: Sequence[Pixels] = (), max_new: int = 16,
           stops: Sequence[int] = ()) -> list[int]:
    """Output ids, up to and including the first of `stops`.

    The model is stepped over its own cache, where it adds its M-RoPE delta to the length; that agrees with a single pass over
    the whole text. `generate` is not asked: it counts each axis on from the prompt's last token, so that after a prompt that
    ends in an image it stands elsewhere than a single pass, by up to 4.6 in a logit of the demo model (transformers 5.24.0).
    """
    model = _model(folder)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None  # else a text would be placed by the last picture's
    step = model(**_inputs(folder, tokens, pixels), use_cache=True)
    out = [int(step.logits[0, -1].argmax())]
    while len(out) < max_new and out[-1] not in stops:
        step = model(input_ids=torch.tensor([[out[-1]]]), cache=step.cache, use_cache=True)
        out.append(int(step.logits[0, -1].argmax()))
    return out
