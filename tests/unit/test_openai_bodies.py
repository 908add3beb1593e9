"""Bodies to requests without any process: what is refused at parse, and what a refusal may say."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import responses
from router.openai import MAX_VALUES, chat_request, completion_request, parse
from slipstream.errors import InvalidRequestError
from tests.support.talking import ITEMS, TALK, replaced

GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    *("model", "messages", "stream", "stream_options", "temperature", "top_p", "seed", "max_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "n", "logit_bias", "tools", "response_format", "top_k", "max_completion_tokens", "modalities", "prompt"),
    *("tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "echo", "input", "instructions"),
    *("prompt_logprobs", "text", "reasoning", "include", "max_output_tokens", "metadata", "truncation", "previous_response_id"),
)


@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed", "n", "top_k", "presence_penalty"])
@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e400", "NaN", "-Infinity"])
def test_numbers_that_are_no_floats_are_refused_by_name(field: str, number: str) -> None:
    body = parse(f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "{field}": {number}}}'.encode())
    with pytest.raises(InvalidRequestError) as caught:
        chat_request(body)
    assert caught.value.field == field


@given(st.sampled_from(["video", "video_url"]), st.fixed_dictionaries({}, optional={
    "value": JSON | st.lists(st.text(max_size=5), min_size=2, max_size=3), "fps": JSON,
    "timestamps": JSON | st.lists(st.floats() | st.integers(), max_size=3), "role": st.sampled_from(["user", "system"])}))
@settings(max_examples=300, deadline=None)
def test_any_video_is_taken_or_refused(kind: str, fields: dict[str, Any]) -> None:
    role, value = fields.pop("role", "user"), fields.pop("value", None)
    try:
        request = chat_request({"model": "m", "messages": [{"role": role, "content": [{"type": kind, kind: value, **fields}]}]})
    except InvalidRequestError as refusal:
        good = refusal.field is not None and len(refusal.message) < 300
    else:
        (part,) = request.messages[0]["content"]
        good = len(part["video"].stills) == len(part["video"].seconds) >= 2
        good = good and all(b > a for a, b in pairwise(part["video"].seconds))
    assert good, "a video with ascending times, or a field that is named"


@given(st.sampled_from(FIELDS), JSON)
@settings(max_examples=300, deadline=None)
def test_any_value_anywhere_is_taken_or_refused(field: str, value: Any) -> None:
    """Nothing but a typed refusal comes out, and it is short."""
    own = {"model": "m", "input": "x"}
    for read, body in ((chat_request, GOOD), (completion_request, GOOD), (responses.chat_request, own)):
        try:
            read({**body, field: value})
        except InvalidRequestError as error:
            assert len(error.message) < 500  # noqa: PT017 (taken is as good as refused)


@given(st.lists(st.integers(0, 30), max_size=7), JSON, st.booleans())
@settings(max_examples=600, deadline=None)
def test_any_value_inside_a_conversation_is_taken_or_refused(path: list[int], value: Any, items: bool) -> None:
    read, body = (responses.chat_request, ITEMS) if items else (chat_request, TALK)
    read(body)
    try:
        read(replaced(body, path, value))
    except InvalidRequestError as error:
        assert len(error.message) < 500  # noqa: PT017 (taken is as good as refused)


@pytest.mark.parametrize("filling", ["1,", "[],", '{"a":1},'])
def test_bodies_of_very_many_values_are_not_even_parsed(filling: str) -> None:
    """Megabytes of brackets would take everybody's time for as long as they are parsed."""
    body = ('{"model": "m", "prompt": [' + filling * (MAX_VALUES + 1) + "1]}").encode()
    with pytest.raises(InvalidRequestError, match=str(MAX_VALUES)):
        parse(body)


def test_long_texts_and_pictures_are_few_values() -> None:
    url = "data:image/png;base64," + "A" * (4 << 20)
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "word, " * 100_000}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    assert parse(json.dumps(body).encode()) == body
    ids = {"model": "m", "prompt": [1] * 300_000}
    assert completion_request(parse(json.dumps(ids).encode())).prompt == ids["prompt"]


def test_ten_thousand_wrong_messages_give_one_short_error() -> None:
    for messages in ([5] * 4000, [{"role": "user", "content": [7] * 10_000}], ["SECRET"] * 10_000):
        with pytest.raises(InvalidRequestError) as caught:
            chat_request({"model": "m", "messages": messages})
        assert len(caught.value.message) < 500
        assert "SECRET" not in caught.value.message
        assert caught.value.field is not None
        assert caught.value.field.startswith("messages")
