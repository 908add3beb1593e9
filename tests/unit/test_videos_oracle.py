"""Videos as frames against transformers' processors: sizes, times, pixels, token ids; and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.video_utils import VideoMetadata

from router.openai import chat_request
from router.prompt import Prompt, PromptBuilder
from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO, ImageConfig, VideoConfig
from slipstream.config import RouterConfig
from slipstream.errors import CancelledError, CheckpointError, InvalidRequestError
from slipstream.text import videos
from slipstream.text.images import Still

CHECKPOINT = checkpoints.read(DEMO)
assert CHECKPOINT.image is not None
assert CHECKPOINT.video is not None
IMAGE: ImageConfig = CHECKPOINT.image
VIDEO: VideoConfig = CHECKPOINT.video
NOBODY: Any = None
BY_TIME = dataclasses.replace(VIDEO, timestamps=False, tokens_per_second=2.0)


def noise(frames: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), np.uint8)


def url(frame: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def stills(urls: Iterable[str]) -> Iterator[Still]:
    return (Still(url=one, field=f"f[{number}]") for number, one in enumerate(urls))


def asked(frames: NDArray[np.uint8], fps: float = 2.0) -> videos.Frames:
    return videos.Frames(stills=tuple(stills(map(url, frames))), seconds=tuple(i / fps for i in range(len(frames))), field="f")


def chat(content: list[dict[str, Any]], **config: Any) -> Prompt:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return PromptBuilder(CHECKPOINT, RouterConfig(**config)).chat(chat_request(body).messages, lambda count: None)


def test_the_demo_is_read() -> None:
    assert VideoConfig(min_pixels=1024, max_pixels=1 << 20, temporal_patch_size=2, timestamps=True,
                                tokens_per_second=None) == VIDEO


@pytest.mark.parametrize(("kind", "files", "wanted"), [
    ("Qwen3VL", {}, (128 * 32**2, 768 * 32**2, True, None)),
    ("Qwen3VL", {"preprocessor_config": {"size": {"shortest_edge": 7, "longest_edge": 8}}}, (7, 8, True, None)),
    ("Qwen3VL", {"preprocessor_config": {"size": {"shortest_edge": 7, "longest_edge": 8}},
                  "processor_config": {"video_processor": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}}},
     (4096, 25165824, True, None)),
    ("Qwen2_5_VL", {"preprocessor_config": {"min_pixels": 3136, "max_pixels": 12845056}}, (3136, 12845056, False, 2.0)),
    ("Qwen2VL", {}, (128 * 32**2, 768 * 32**2, False, None)),
])
def test_families(kind: str, files: dict[str, Any], wanted: tuple[Any, ...], tmp_path: Path) -> None:
    """Qwen3-VL and Qwen3.5 write times; Qwen2.5-VL counts them in positions; Qwen2-VL knows none."""
    config = json.loads((DEMO / "config.json").read_text()) | {"architectures": [f"{kind}ForConditionalGeneration"]}
    config["vision_config"] |= {"deepstack_visual_indexes": []}
    if kind != "Qwen3VL":
        del config["vision_config"]["hidden_act"]
        config["vision_config"] |= {"embed_dim": 128, "hidden_size": 256} if kind == "Qwen2VL" else {
            "tokens_per_second": 2, "window_size": 64, "fullatt_block_indexes": []}
    for name, content in {"config": config, **files}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = checkpoints.read(tmp_path).video
    assert found is not None
    assert (found.min_pixels, found.max_pixels, found.timestamps, found.tokens_per_second) == wanted


def test_another_normalisation_than_that_of_pictures_is_refused(tmp_path: Path) -> None:
    for name, change in (("config", {}), ("preprocessor_config", {}), ("video_preprocessor_config", {"image_mean": [0.1] * 3})):
        content = json.loads((DEMO / f"{name}.json").read_text()) | change
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"video processor's image_mean is \[0\.1, 0\.1, 0\.1\]"):
        checkpoints.read(tmp_path)


@given(st.integers(2, 40), st.integers(3, 1500), st.integers(3, 1500), st.sampled_from([28, 32]),
       st.sampled_from([(1024, 1048576), (128 * 1024, 768 * 1024), (4096, 25165824)]))
@settings(max_examples=500, deadline=None)
def test_sizes_equal_transformers(frames: int, height: int, width: int, factor: int, limits: tuple[int, int]) -> None:
    if max(height, width) / min(height, width) > 150:
        return
    image = dataclasses.replace(IMAGE, patch_size=factor // 2)
    config = dataclasses.replace(VIDEO, min_pixels=limits[0], max_pixels=limits[1])
    wanted = smart_resize(frames, height, width, factor=factor, min_pixels=limits[0], max_pixels=limits[1])
    assert videos.frame_size(frames, height, width, image, config) == wanted


@given(st.integers(2, 30), st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0, 24.0, 29.97]))
@settings(deadline=None)
def test_times_equal_transformers(count: int, fps: float) -> None:
    """One for each pair of frames: the mean of both (MR-14)."""
    wanted = Qwen3VLProcessor._calculate_timestamps(NOBODY, list(range(count)), fps, 2)
    frames = videos.Frames(stills=tuple(stills([""] * count)), seconds=tuple(i / fps for i in range(count)), field="f")
    assert videos.stamps(frames, VIDEO) == [f"<{seconds:.1f} seconds>" for seconds in wanted]


@pytest.mark.parametrize(("count", "height", "width"), [(2, 64, 96), (5, 50, 300), (4, 700, 500), (3, 20, 40)])
def test_pixels_are_those_of_transformers(count: int, height: int, width: int) -> None:
    """Antialiased bicubic. Torch rounds on the way where Pillow does not: a level or two apart."""
    frames = noise(count, height, width)
    groups = videos.decode(asked(frames), IMAGE, VIDEO, max_pixels=1 << 20)
    ours = np.concatenate([group.pixels for group in groups])
    high, wide = smart_resize(count, height, width, factor=32, min_pixels=1024, max_pixels=1 << 20)
    assert ours.shape == (count + count % 2, high, wide, 3)
    theirs = torch.nn.functional.interpolate(torch.tensor(frames).permute(0, 3, 1, 2), (high, wide), mode="bicubic",
                                             antialias=True)
    far = np.abs(ours[:count].astype(int) - theirs.permute(0, 2, 3, 1).numpy().astype(int))
    assert far.max() <= 2
    assert count % 2 == 0 or (ours[-1] == ours[-2]).all(), "an odd number of frames repeats the last"
    assert {(group.grid.t, group.grid.h, group.grid.w) for group in groups} == {(1, high // 16, wide // 16)}
    assert len({group.content_hash for group in groups}) == len(groups)


def test_a_request_that_is_left_is_not_decoded_to_its_end() -> None:
    """Room is taken group by group: 3 groups of 2 frames of 64x96, and an end after the second."""
    taken: list[int] = []

    def take(count: int) -> None:
        taken.append(count)
        if len(taken) == 2:
            raise CancelledError("nobody waits")

    with pytest.raises(CancelledError):
        videos.decode(asked(noise(5, 64, 96)), IMAGE, VIDEO, max_pixels=1 << 20, take=take)
    assert taken == [2 * 64 * 96 * 3] * 2


def test_where_time_is_counted_a_video_is_one_grid() -> None:
    frames = noise(5, 64, 96)
    (whole,) = videos.decode(asked(frames, fps=3), IMAGE, BY_TIME, max_pixels=1 << 20)
    assert whole.pixels.shape == (6, 64, 96, 3)
    assert (whole.grid.t, whole.grid.h, whole.grid.w) == (3, 4, 6)
    assert whole.grid.t_step == pytest.approx(2 * 2 / 3)
    (still,) = videos.decode(asked(frames), IMAGE, dataclasses.replace(BY_TIME, tokens_per_second=None), max_pixels=1 << 20)
    assert still.grid.t_step == 1


def test_ids_equal_transformers() -> None:
    """The template's one place becomes a time and a place for each group of frames; the times are part of the text before them,
    with which their tokens may join. A user's own `<|video_pad|>` stays text. The processor's first
    version put its text in the place of vision_start, video_pad and vision_end; that of 5.24, in that of video_pad alone."""
    frames = noise(5, 64, 96)
    prompt = chat([{"type": "text", "text": "What happens at <"}, {"type": "video", "video": list(map(url, frames)), "fps": 4},
                   {"type": "text", "text": " and then <|video_pad|> "},
                   {"type": "image_url", "image_url": {"url": url(frames[0])}}, {"type": "text", "text": "?"}])
    processor: Any = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.video_token = "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.video_processor = type("Sizes", (), {"merge_size": 2, "temporal_patch_size": 2})
    metadata = VideoMetadata(total_num_frames=5, fps=4, frames_indices=list(range(5)))
    video = processor.replace_video_token({"video_grid_thw": torch.tensor([[3, 4, 6]]), "video_metadata": [metadata]}, 0)
    assert video.count("<|video_pad|>") == 18
    assert video.startswith("<0.1 seconds><|vision_start|>")

    def ids(text: str, special: bool = True) -> list[int]:
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        tokenizer.encode_special_tokens = not special
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    assert list(prompt.tokens) == [
        *ids(f"<|im_start|>user\nWhat happens at <{video}"), *ids(" and then <|video_pad|> ", special=False),
        *ids(f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>?<|im_end|>\n<|im_start|>assistant\n")]
    assert [picture.is_video for picture in prompt.pictures] == [True, True, True, False]


@pytest.mark.parametrize("kind", ["video", "video_url"])
def test_one_url_of_several_frames_is_the_same_video(kind: str) -> None:
    """As vLLM takes them; a picture's own type is read from its bytes."""
    frames = list(map(url, noise(3, 64, 96)))
    joined = "data:video/jpeg;base64," + ",".join(frame.partition(",")[2] for frame in frames)
    value: Any = {"url": joined, "fps": 3} if kind == "video_url" else joined
    found = chat([{"type": kind, kind: value, **({"fps": 3} if kind == "video" else {})}])
    listed = chat([{"type": "video", "video": frames, "fps": 3}])
    assert found.tokens == listed.tokens
    assert [one.content_hash for one in found.pictures] == [one.content_hash for one in listed.pictures]
    timed = chat([{"type": "video", "video": frames, "timestamps": [0, 1 / 3, 2 / 3]}])
    assert timed.tokens == listed.tokens


FRAMES = list(map(url, noise(2, 32, 32)))


@pytest.mark.parametrize(("part", "words"), [
    ({"type": "video", "video": FRAMES[:1]}, "has 1 frames; send two or more"),
    ({"type": "video", "video": []}, "has 0 frames"),
    ({"type": "video", "video": "http://127.0.0.1/a.mp4"}, "video files are not decoded"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "video files are not decoded"),
    ({"type": "video", "video": [1, 2]}, "must be a list of frames"),
    ({"type": "video"}, "must be a list of frames"),
    ({"type": "video", "video": ["http://127.0.0.1/a.png"] * 2}, "not fetched"),
    ({"type": "video", "video": FRAMES, "fps": 1e-9}, r"fps must be a number from 0\.01 to 1000"),
    ({"type": "video", "video": FRAMES, "fps": float("nan")}, "fps must be a number"),
    ({"type": "video", "video": FRAMES, "timestamps": [0]}, "timestamps must be a list of 2 numbers"),
    ({"type": "video", "video": FRAMES, "timestamps": [1, 1]}, "timestamps must ascend"),
    ({"type": "video", "video": FRAMES, "timestamps": [0, 1e300]}, "timestamps must be a number from 0 to 1e"),
    ({"type": "video", "video": [FRAMES[0], url(noise(1, 32, 64)[0])]}, "frame 1 is 64x32 pixels, the first 32x32"),
    ({"type": "video", "video": [FRAMES[0], "data:image/png;base64,AAAA"]}, "not a picture that can be read"),
    ({"type": "video", "video": FRAMES * 3}, r"6 frames of videos; a request may hold 5 .*send fewer"),
])
def test_refusals_say_how(part: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        chat([{"type": "text", "text": "x"}, part], max_video_frames=5)
    assert (caught.value.field or "").startswith("messages")


def test_a_text_only_model_takes_no_pictures() -> None:
    messages = chat_request({"model": "m", "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": FRAMES[0]}}]}]}).messages
    blind = dataclasses.replace(CHECKPOINT, video=None, image=None, vision=None)
    with pytest.raises(InvalidRequestError, match="this model is text-only; send the request without images") as caught:
        PromptBuilder(blind, RouterConfig()).chat(messages, lambda count: None)
    assert caught.value.field == "messages[0].content[0].image_url"
    assert caught.value.http_status == 400


def test_models_without_videos_and_templates_without_a_place() -> None:
    content = [{"type": "video", "video": FRAMES}]
    messages = chat_request({"model": "m", "messages": [{"role": "user", "content": content}]}).messages
    for change, words in (({"video": None}, "takes no videos"), ({"video": None, "image": None, "vision": None}, "text-only"),
                          ({"vision_end_token_id": 5}, "makes places for 0 videos and the request holds 1")):
        builder = PromptBuilder(dataclasses.replace(CHECKPOINT, **change), RouterConfig())
        with pytest.raises(InvalidRequestError, match=words):
            builder.chat(messages, lambda count: None)
