"""Every architecture against transformers: logits at any chunking, decode through the caches, greedy tokens; noise of bfloat16.

Logits agree to 1e-4, or to 1e-5 of the largest logit where that is more: the demo model's logits reach 25, and on random text
transformers in float32 is itself up to 1.3e-4 away from float64 (docs/decisions/2026-12-01-logit-tolerance.md).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream import checkpoint as checkpoints
from slipstream.kernels import reference
from slipstream.models import registry
from slipstream.models.qwen import CausalLM
from slipstream.positions import mrope_positions
from slipstream.types import Grid
from tests.support import oracle, tiny
from tests.support.plain import BLOCK_SIZE, Plain

TOLERANCE = 1e-4
CHUNKS = [7, 64, 1 << 30]

Pixels = NDArray[np.uint8]


def differ(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in units of what is allowed: at most 1 is equal."""
    allowed = max(TOLERANCE, 1e-5 * float(expected.abs().max()))
    return float((found - expected).abs().max()) / allowed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {"demo": checkpoints.DEMO, **{name: tiny.write(name, root / name) for name in tiny.NAMES}}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, CausalLM]:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    return {name: registry.load(checkpoints.read(folder), dtype=torch.float32, device=cpu) for name, folder in folders.items()}


def picture(height: int, width: int, seed: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ids(count: int, seed: int, high: int = 490) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, high, count)]


def with_images(parts: Sequence[list[int] | Pixels], image: int, start: int, end: int) -> tuple[list[int], list[Pixels]]:
    """Token lists and pictures in prompt order; a picture of h x w pixels takes (h / 32) * (w / 32) tokens."""
    tokens: list[int] = []
    pixels: list[Pixels] = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
        else:
            tokens += [start, *[image] * (part.shape[0] // 32 * (part.shape[1] // 32)), end]
            pixels.append(part)
    return tokens, pixels


def prompts(checkpoint: checkpoints.Checkpoint) -> dict[str, tuple[list[int], list[Pixels]]]:
    found: dict[str, tuple[list[int], list[Pixels]]] = {
        "text": (ids(150, 1), []), "one token": (ids(1, 2), []), "one block": (ids(BLOCK_SIZE, 3), []),
        "a block and one": (ids(BLOCK_SIZE + 1, 4), [])}
    if checkpoint.image_token_id is not None:
        marks = (checkpoint.image_token_id, checkpoint.vision_start_token_id or 0, checkpoint.vision_end_token_id or 0)
        wide, tall = picture(96, 224, 5), picture(192, 64, 6)
        found["one image"] = with_images([ids(5, 7), wide, ids(6, 8)], *marks)
        found["two images"] = with_images([ids(3, 9), wide, ids(2, 10), tall, ids(4, 11)], *marks)
        found["image first"] = with_images([tall, ids(5, 12)], *marks)
        tokens, pixels = with_images([ids(5, 13), wide], *marks)
        found["last token is an image's"] = (tokens[:-1], pixels)
    return found


@pytest.mark.parametrize("name", ["demo", *tiny.NAMES])
def test_logits_equal_at_every_chunking(name: str, folders: dict[str, Path], models: dict[str, CausalLM]) -> None:
    checkpoint = checkpoints.read(folders[name])
    for what, (tokens, pixels) in prompts(checkpoint).items():
        expected = oracle.logits(folders[name], tokens, pixels)
        for chunk in CHUNKS:
            found = Plain(model=models[name], checkpoint=checkpoint).prefill(tokens, pixels, chunk=chunk)
            assert differ(found, expected) < 1, f"{what}, chunks of {chunk}"


@pytest.mark.parametrize("name", ["demo", *tiny.NAMES])
def test_greedy_tokens_equal_through_the_caches(name: str, folders: dict[str, Path], models: dict[str, CausalLM]) -> None:
    checkpoint = checkpoints.read(folders[name])
    for what, (tokens, pixels) in prompts(checkpoint).items():
        expected = oracle.greedy(folders[name], tokens, pixels, max_new=20)
        for chunk in CHUNKS:
            sequence = Plain(model=models[name], checkpoint=checkpoint)
            first = int(sequence.prefill(tokens, pixels, chunk=chunk)[-1].argmax())
            assert sequence.greedy(first, 20) == expected, f"{what}, chunks of {chunk}"


@pytest.mark.parametrize("name", ["demo", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl"])
def test_positions_matter_and_a_swap_or_a_lost_delta_is_noticed(name: str, folders: dict[str, Path],
                                                                models: dict[str, CausalLM]) -> None:
    """The comparison would fail if two axes were swapped, all were equal, or decode forgot the delta: shown by doing it."""
    checkpoint = checkpoints.read(folders[name])
    assert checkpoint.image_token_id is not None
    marks = (checkpoint.image_token_id, checkpoint.vision_start_token_id or 0, checkpoint.vision_end_token_id or 0)
    tokens, pixels = with_images([picture(96, 224, 5), ids(6, 8)], *marks)
    expected = oracle.logits(folders[name], tokens, pixels)
    right, delta = mrope_positions(tokens, [Grid(t=1, h=6, w=14)], image_token_id=checkpoint.image_token_id,
                                   video_token_id=checkpoint.video_token_id, merge_size=2)
    assert right[0].tolist() == [0, 0, 0]
    assert len({tuple(axis) for axis in right.T.tolist()}) == 3, "the three axes must differ"
    wrong = {"h and w swapped": right[:, [0, 2, 1]], "t and h swapped": right[:, [1, 0, 2]],
             "all axes equal": np.repeat(np.arange(len(tokens), dtype=np.int32)[:, None], 3, 1)}
    for what, positions in wrong.items():
        sequence = Plain(model=models[name], checkpoint=checkpoint)
        found = sequence.prefill(tokens, pixels, positions=np.ascontiguousarray(positions))
        assert differ(found, expected) > 20, what
    token = int(expected[-1].argmax())
    after = oracle.logits(folders[name], [*tokens, token], pixels)[-1]
    kept, lost = (Plain(model=models[name], checkpoint=checkpoint) for _ in range(2))
    kept.prefill(tokens, pixels)
    lost.prefill(tokens, pixels)
    assert delta != 0
    assert differ(kept.decode(token), after) < 1
    assert differ(lost.decode(token, delta=0), after) > 10


def test_text_only_positions_are_those_of_a_fresh_worker(folders: dict[str, Path], models: dict[str, CausalLM]) -> None:
    """An image request before it leaves no delta behind (MR-05)."""
    checkpoint = checkpoints.read(folders["demo"])
    tokens, pixels = prompts(checkpoint)["one image"]
    Plain(model=models["demo"], checkpoint=checkpoint).prefill(tokens, pixels)
    after = Plain(model=models["demo"], checkpoint=checkpoint)
    found = after.prefill(ids(20, 3))
    assert after.delta == 0
    assert differ(found, oracle.logits(folders["demo"], ids(20, 3))) < 1


def test_a_text_only_class_reads_a_vision_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    """Qwen3_5ForCausalLM with `model.language_model.` names and a tower that it does not want."""
    folder = tmp_path / "text-of-vl"
    shutil.copytree(folders["qwen3_5_vl"], folder)
    config = json.loads((folder / "config.json").read_text())
    text = {**config["text_config"], "architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(text))
    checkpoint = checkpoints.read(folder)
    assert checkpoint.vision is None
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    assert not isinstance(model, registry.VisionModel)
    tokens = ids(40, 5)
    found = Plain(model=model, checkpoint=checkpoint).prefill(tokens, chunk=7)
    assert differ(found, oracle.logits(folders["qwen3_5_vl"], tokens)) < 1


@pytest.mark.parametrize("name", ["demo", *tiny.NAMES])
def test_bfloat16_is_as_near_to_float64_as_transformers_is(name: str, folders: dict[str, Path]) -> None:
    """By the row in the middle: where rounding sends a token to other experts, both are far off, each elsewhere."""
    checkpoint = checkpoints.read(folders[name])
    tokens, pixels = with_images([ids(90, 21)], 0, 0, 0)
    if checkpoint.image_token_id is not None:
        marks = (checkpoint.image_token_id, checkpoint.vision_start_token_id or 0, checkpoint.vision_end_token_id or 0)
        tokens, pixels = with_images([ids(40, 7), picture(96, 224, 5), ids(30, 8)], *marks)
    model = registry.load(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    exact = oracle.logits(folders[name], tokens, pixels, torch.float64)

    def noise(found: torch.Tensor) -> float:
        return float((found.double() - exact).square().mean(-1).sqrt().median())

    ours = noise(Plain(model=model, checkpoint=checkpoint).prefill(tokens, pixels, chunk=23))
    theirs = noise(oracle.logits(folders[name], tokens, pixels, torch.bfloat16))
    assert 1e-3 < ours < 1.25 * theirs, (ours, theirs)


def test_gdn_state_in_float32_does_not_drift() -> None:
    """2,000 decode steps of one random Gated-DeltaNet recurrence against float64 (HY-05)."""
    generator = torch.Generator().manual_seed(0)
    heads, size = 4, 16

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True))

    state, exact = torch.zeros(1, heads, size, size), torch.zeros(1, heads, size, size, dtype=torch.float64)
    for _ in range(2000):
        q, k = (unit(torch.randn(1, heads, size, generator=generator)) for _ in range(2))
        v = torch.randn(1, heads, size, generator=generator)
        decay, beta = -torch.rand(1, heads, generator=generator) * 0.1, torch.rand(1, heads, generator=generator)
        out, state = reference.gated_delta_step(q, k, v, decay, beta, state)
        exact_out, exact = reference.gated_delta_step(q.double(), k.double(), v.double(), decay.double(), beta.double(), exact)
    assert (state.double() - exact).norm() / exact.norm() < 1e-3
    assert (out.double() - exact_out).norm() / exact_out.norm() < 1e-3
