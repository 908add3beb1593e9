"""What a real router refuses in a body: the field at fault is named, and no worker hears of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.checkpoint import DEMO
from tests.support.fake_workers import Plan
from tests.support.scripted_router import (
    CHAT,
    CHECKPOINT,
    COMPLETIONS,
    CONTEXT,
    MESSAGES,
    MODEL,
    REFUSING,
    Front,
    front,
    no_worker_hears,
    picture,
    refused,
)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("router"), *REFUSING) as one:
        yield one


@pytest.fixture(autouse=True)
def untouched(router: Front) -> Iterator[None]:
    with no_worker_hears(router):
        yield


NO_NUMBERS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, True, "1", [], 5)
NO_COUNTS: tuple[Any, ...] = (0, -1, 1.5, 2.0, True, "5", [], 1 << 70, math.nan)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p")
          for value in NO_NUMBERS],
        *[("repetition_penalty", value) for value in NO_NUMBERS[:-1]],
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", -1),
        ("top_p", 1.01),
        *[(name, value) for name in ("max_tokens", "max_completion_tokens") for value in NO_COUNTS],
        ("seed", 1.5),
        ("seed", True),
        ("seed", "x"),
        ("seed", 1 << 70),
        ("n", 17),
        ("cache_salt", 7),
        ("cache_salt", "x" * 257),
        ("priority", 101),
        ("priority", 1.5),
        ("n", 0),
        ("n", 100000),
        ("n", "1"),
        ("n", True),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", 5),
        ("stream_options", {"include_usage": 1}),
        ("top_logprobs", 5),
        ("top_logprobs", 16384),
        ("logit_bias", {"999999999": 5}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema", "schema": {}}),
        ("response_format", "x"),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 5),
        ("stop", ["a"] * 500),
        ("stop", [1]),
        ("stop", ""),
        ("stop", {"a": 1}),
        ("top_k", 0.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 1e-320),
        ("presence_penalty", 2.5),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": math.nan}),
        ("min_tokens", -1),
        ("chat_template", "{{ 1 }}"),
        ("best_of", 2),
        ("echo", True),
        ("prompt_embeds", "AAAA"),
        ("unheard_of", 1),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("guided_json", {}),
        ("guided_regex", "("),
        ("stop_token_ids", "x"),
        ("stop_token_ids", [-1]),
        ("ignore_eos", "x"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_fields(router: Front, field: str, value: Any, stream: bool) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "stream": stream, field: value}
    if field == "stream_options":
        body["stream"] = True
    error = refused(router.post(CHAT, body))
    assert error["param"] is not None
    assert error["param"].split(".")[0] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("logprobs", False),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tool_choice", "none"),
        ("stop", None),
        ("temperature", None),
        ("max_tokens", None),
        ("temperature", 1e-9),
        ("temperature", 2),
        ("top_p", 1),
        ("seed", -3),
        ("seed", 0),
        ("stop", []),
        ("stream_options", None),
        ("service_tier", "auto"),
        ("parallel_tool_calls", False),
        ("modalities", ["text"]),
    ],
)
def test_fields_that_change_nothing(router: Front, field: str, value: Any) -> None:
    for worker in router.workers.values():
        worker.submits.pop()  # the fixture looks for refusals only
    router.stage.next(Plan(tokens=(100, 1913)))
    reply = router.post(CHAT, {"model": MODEL, "messages": MESSAGES, field: value})
    assert reply.status_code == 200, reply.text


def test_a_call_of_the_history_is_named(router: Front) -> None:
    """API-27."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"cut'}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    refused(router.post(CHAT, {"model": MODEL, "messages": history}), param="messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "x",
        {},
        [5],
        [[]],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": 5}],
        [{"role": "wizard", "content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}],
        [{"role": "user", "content": [{"image_url": "x"}]}],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
            }
        ],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "user", "content": 5}] * 10000,
    ],
)
def test_messages(router: Front, messages: Any) -> None:
    assert refused(router.post(CHAT, {"model": MODEL, "messages": messages}))["param"].startswith("messages")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [""],
        [],
        [[]],
        None,
        5,
        {},
        [-1],
        [5, -2],
        [1 << 40],
        [1 << 80],
        [1.0],
        [True],
        ["a", "b"],
        [[1], [2]],
        [None],
        ["a", 1],
        [[["a"]]],
        [CHECKPOINT.vocab_size],
    ],
)
def test_prompts(router: Front, prompt: Any) -> None:
    refused(router.post(COMPLETIONS, {"model": MODEL, "prompt": prompt}), param="prompt")


def test_ids_with_unmatched_placeholders(router: Front) -> None:
    for token in (CHECKPOINT.image_token_id, CHECKPOINT.video_token_id):
        refused(router.post(COMPLETIONS, {"model": MODEL, "prompt": [100, token, 101]}), param="prompt")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/a.png",
        "https://169.254.169.254/x",
        "http://[::1]/",
        "http://2130706433/",
        "file:///etc/passwd",
        "data:image/png;base64,",
        "data:image/png;base64,AAAA",
        "data:image/svg+xml;base64,PHN2Zy8+",
        "ftp://x/",
        "x",
    ],
)
def test_picture_urls(router: Front, url: str) -> None:
    content = [{"type": "text", "text": "SECRETWORD"}, {"type": "image_url", "image_url": {"url": url}}]
    error = refused(router.chat(content))
    assert error["param"].startswith("messages[0].content[1]")


@pytest.mark.parametrize(("height", "width"), [(2, 2), (1, 100), (1, 10000), (4, 900)])
def test_pictures_of_no_use(router: Front, height: int, width: int) -> None:
    for stream in (False, True):
        reply = router.chat([picture(height, width)], stream=stream)
        assert f"{width}x{height}" in refused(reply)["message"]


def test_too_many_pictures(router: Front) -> None:
    assert "3" in refused(router.chat([picture(32, 32)] * 4))["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_only_model_refuses_pictures_and_videos(blind: Front, stream: bool) -> None:
    """Over HTTP, with the field at fault; no worker hears of it, and texts are answered."""
    url = picture(64, 64)["image_url"]["url"]
    for part, name in ((picture(64, 64), "image_url"), ({"type": "video", "video": [url, url]}, "video")):
        content = [{"type": "text", "text": "SECRETWORD"}, part]
        with no_worker_hears(blind):
            error = refused(blind.chat(content, stream=stream))
        assert "this model is text-only; send the request without images" in error["message"]
        assert error["param"] == f"messages[0].content[1].{name}"
    blind.stage.next(Plan(tokens=(100, 1913)))
    assert blind.chat("hello").status_code == 200


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A router of the demo's text-only class."""
    folder = tmp_path_factory.mktemp("blind")
    for file in DEMO.iterdir():
        if not file.name.startswith(("model", "config")):
            (folder / file.name).symlink_to(file)
    text = json.loads((DEMO / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(text | {"architectures": ["Qwen3_5ForCausalLM"]}))
    with front(folder, f"model.path={folder}") as one:
        yield one


# Context ---------------------------------------------------------------------------------------------------------------


def test_context_overflow_names_three_numbers(router: Front) -> None:
    ids = [100] * 14
    message = refused(router.post(COMPLETIONS, {"model": MODEL, "prompt": ids, "max_tokens": 50000}), param="max_tokens")[
        "message"
    ]
    assert all(str(number) in message for number in (14, 50000, CONTEXT))
    error = refused(router.post(COMPLETIONS, {"model": MODEL, "prompt": [100] * CONTEXT}))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert str(CONTEXT) in error["message"]


def test_context_counts_pictures(router: Front) -> None:
    side = int(math.sqrt(CHECKPOINT.image.max_pixels)) // 32 * 32  # type: ignore[union-attr]
    tokens = (side // 32) ** 2 * 3
    reply = router.chat([picture(side, side)] * 3, max_tokens=CONTEXT - 100)
    message = refused(reply)["message"]
    assert any(int(word) > tokens for word in message.replace(",", " ").split() if word.isdigit())
    assert str(CONTEXT) in message
