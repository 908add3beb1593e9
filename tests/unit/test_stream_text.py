"""Stop strings over every cut, and the shapes of streamed objects."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.completions import Shape
from router.stream import DONE, StopFilter, error_body, event, usage
from slipstream.errors import InvalidRequestError, UnavailableError

SHAPES = [Shape(id="x", model="m", created=1, chat=chat) for chat in (True, False)]


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """By the definition: the first end of any stop string, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return text[: end - max(map(len, here))], True
    return text, False


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 24), max_size=6),
)
@settings(max_examples=500, deadline=None)
def test_every_cut_gives_the_text_of_the_whole(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    held = StopFilter(stops)
    shown = "".join(held.add(text[a:b]) for a, b in pairwise(edges)) + held.finish()
    assert (shown, held.stopped) == expected(text, stops)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_only_a_live_beginning_is_held_back(text: str, stops: list[str]) -> None:
    """After each character what is hidden is the longest end of the text that begins a stop string, no less and no more."""
    held, shown = StopFilter(stops), ""
    for count, letter in enumerate(text, start=1):
        shown += held.add(letter)
        if held.stopped:
            return
        live = max(
            (size for stop in stops for size in range(1, len(stop)) if text[:count].endswith(stop[:size])), default=0
        )
        assert len(shown) == count - live


def test_stop_strings_that_share_a_text() -> None:
    for stops, text, wanted in (
        (["DEFGHIJ"], "ABC DEFGHIJ", "ABC "),
        (["b,c"], "a b,b,c d", "a b,"),
        (["aab"], "aaab", "a"),
        (["xyz", "y"], "axyz", "ax"),  # y is complete first
        (["yz", "xyz"], "axyz", "a"),  # both are complete at z
        (["ň🙂"], "kůň🙂", "ků"),
    ):
        held = StopFilter(stops)
        assert "".join(held.add(letter) for letter in text) + held.finish() == wanted
        assert held.stopped


@pytest.mark.parametrize("shape", SHAPES)
def test_usage_is_null_on_chunks_only_where_asked(shape: Shape) -> None:
    assert "usage" not in shape.chunk(0, {"content": "x"}, None)
    asked = shape.chunk(0, {"content": "x"}, None, usage=True)
    assert asked["usage"] is None
    assert len(asked["choices"]) == 1
    last = shape.usage_chunk(usage(3, 4, 2))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert last["object"] == asked["object"]


def test_an_event_is_one_line_whatever_the_text() -> None:
    text = 'line\r\n\ndata: [DONE]\u2028\x00"'
    data = event(SHAPES[0].chunk(0, {"content": text}, None))
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    assert b"\r" not in data
    assert json.loads(data[6:])["choices"][0]["delta"]["content"] == text
    assert data != DONE


def test_errors_have_openais_form() -> None:
    assert error_body(InvalidRequestError("bad", field="top_p")) == {
        "error": {"message": "bad", "type": "invalid_request_error", "param": "top_p", "code": "invalid_request"}
    }
    assert error_body(UnavailableError("gone"))["error"]["type"] == "server_error"
