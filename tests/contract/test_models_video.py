"""Videos as groups of frames against transformers in fp32: patches, embeddings, logits at any chunking, greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream import checkpoint as checkpoints
from slipstream.engine.prompt import block_keys, prepare
from slipstream.errors import InvalidRequestError
from slipstream.models import registry
from slipstream.models.vision import Patches
from slipstream.types import Grid
from tests.support import oracle, tiny
from tests.support.engine_driver import request
from tests.support.plain import Plain

Pixels = NDArray[np.uint8]
FAMILIES = ["demo", *(name for name in tiny.NAMES if name.endswith("vl"))]
STEP = 1.5
"""Positions from one group of frames to the next, where the family counts time."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("tiny")
    return {"demo": checkpoints.DEMO, **{name: tiny.write(name, root / name) for name in FAMILIES[1:]}}


def noise(seed: int, *shape: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def prompt(folder: Path) -> tuple[list[int], list[Pixels], dict[str, Any]]:
    """A picture, a video of five frames (the last one twice), a shorter video: ours, and what transformers takes."""
    checkpoint = checkpoints.read(folder)
    image, mark = checkpoint.image_token_id, checkpoint.video_token_id
    assert image is not None
    assert mark is not None
    still, long, short = noise(1, 64, 96, 3), noise(2, 5, 64, 160, 3), noise(3, 2, 96, 32, 3)
    long = np.concatenate((long, long[-1:]))
    by_group = not checkpoint.architecture.startswith("Qwen2")
    tokens, pixels = [7, 8, 9] + [image] * 6 + [10, 11], [still]
    for video in (long, short):
        count = video.shape[1] // 32 * (video.shape[2] // 32)
        groups = [video[i:i + 2] for i in range(0, len(video), 2)]
        if by_group:
            for number, group in enumerate(groups):
                tokens += [20 + number, 30, 31] + [mark] * count + [32]
                pixels.append(group)
        else:
            tokens += [30, 31] + [mark] * (count * len(groups)) + [32]
            pixels.append(video)
    tokens += [12, 13, 14, 15]
    given = oracle.inputs(folder, tokens, [still, long, short])
    assert given["video_grid_thw"].tolist() == [[3, 4, 10], [1, 6, 2]]
    if checkpoint.architecture.startswith("Qwen2_5"):
        config = oracle.model(folder).config.vision_config
        given["second_per_grid_ts"] = torch.tensor([STEP / config.tokens_per_second] * 2)
    return tokens, pixels, given


def test_patches_equal_and_an_odd_number_of_frames_repeats_the_last() -> None:
    checkpoint = checkpoints.read(checkpoints.DEMO)
    assert checkpoint.vision is not None
    assert checkpoint.image is not None
    video = noise(4, 3, 64, 96, 3)
    whole = np.concatenate((video, video[-1:]))
    found = Patches(checkpoint.vision, checkpoint.image)([whole[:2], whole[2:]])
    torch.testing.assert_close(found, oracle.patches(checkpoints.DEMO, video)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_equal(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name]
    checkpoint = checkpoints.read(folder)
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    tokens, pixels, given = prompt(folder)
    step = 1.0 if checkpoint.architecture.startswith("Qwen2VL") else STEP
    with torch.no_grad():
        expected = oracle.model(folder)(**given).logits[0]
    allowed = max(1e-4, 1e-5 * float(expected.abs().max()))
    for chunk in (7, 64, 1 << 30):
        found = Plain(model=model, checkpoint=checkpoint).prefill(tokens, pixels, chunk=chunk, t_step=step)
        assert float((found - expected).abs().max()) < allowed, f"chunks of {chunk}"
    swapped = [*pixels[:1], *(np.ascontiguousarray(video[::-1]) for video in pixels[1:])]
    moved = Plain(model=model, checkpoint=checkpoint).prefill(tokens, swapped, t_step=step)
    assert float((moved - expected).abs().max()) > 10 * allowed, "the order of frames is seen"
    sequence = Plain(model=model, checkpoint=checkpoint)
    first = int(sequence.prefill(tokens, pixels, chunk=7, t_step=step)[-1].argmax())
    assert sequence.greedy(first, 12) == oracle.step(folder, given, 12)


def test_the_rate_of_a_video_is_part_of_its_blocks_names() -> None:
    """Same tokens and frames, other positions: from the video's first block on nothing is shared."""
    checkpoint = checkpoints.read(checkpoints.DEMO)
    mark = checkpoint.video_token_id or 0
    tokens = [5] * 16 + [mark] * 8 + [6] * 24

    def keys(step: float, name: bytes = b"x" * 16) -> list[bytes]:
        return block_keys(request("r", tokens, grids=[Grid(t=2, h=4, w=4, t_step=step)], images=[name]), checkpoint, 16) or []

    slow, fast, other = keys(1.0), keys(2.0), keys(1.0, b"y" * 16)
    assert len(slow) == 3
    assert slow[0] == fast[0] == other[0]
    assert not set(slow[1:]) & set(fast[1:])
    assert not set(slow[1:]) & set(other[1:])
    assert keys(1.0) == slow


@pytest.mark.parametrize(("grid", "shape"), [
    (Grid(t=2, h=4, w=4), (64, 64, 3)), (Grid(t=2, h=4, w=4), (2, 64, 64, 3)), (Grid(t=1, h=4, w=4), (4, 64, 64, 3)),
    (Grid(t=1, h=4, w=4), (2, 64, 32, 3)), (Grid(t=1, h=4, w=4), (1, 64, 64, 3))])
def test_frames_that_disagree_with_their_grid_are_refused(grid: Grid, shape: tuple[int, ...]) -> None:
    checkpoint = checkpoints.read(checkpoints.DEMO)
    tokens = [5, *[checkpoint.video_token_id or 0] * (grid.t * 4)]
    with pytest.raises(InvalidRequestError, match=r"its grid \d x 4 x 4 needs uint8"):
        prepare(request("r", tokens, grids=[grid]), [noise(1, *shape)], None, checkpoint, True)
