"""Thinking, text and calls in what a model writes: however it is cut, the parts are those of the whole.

Cases API-04 (thinking), API-08, API-25, API-26, API-28.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.reasoning import Content, Reasoning, ThinkCount, ThinkSplitter
from router.tools import Arguments, Call, ToolParser, typed, types_of

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}, "b": {"type": "boolean"}}},
    "set_volume": {"type": "object", "properties": {"volume": {"type": "integer"}}},
    "none": {},
}
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<function=none>",
    "</function>",
    "<parameter=s>",
    "<parameter=n>",
    "</parameter>",
    '{"name": "f", "arguments": {',
    '{"name": "none", "arguments": {}}',
    '"s": "',
    '"',
    "}",
    "{",
    "\n",
    "<",
    "30",
    "é🙂",
    "\\",
    "x ",
)
Parser = Callable[[], Any]


def told(parser: Any, pieces: Iterable[str]) -> list[Any]:
    """All events, those of one kind and call joined."""
    joined: list[Any] = []
    for event in [*(event for piece in pieces for event in parser.add(piece)), *parser.finish()]:
        last: Any = joined[-1] if joined else None
        if isinstance(event, Call) or type(last) is not type(event) or getattr(last, "index", 0) != getattr(event, "index", 0):
            joined.append(event)
        else:
            joined[-1] = replace(event, text=last.text + event.text)
    return joined


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(at for at in cuts if at < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


CUTS = st.lists(st.integers(0, 120), max_size=30)


@given(st.lists(st.sampled_from(MARKS), max_size=14).map("".join), CUTS)
@example("<tool_call><function=f><parameter=s>\n\n</parameter>", [36, 37, 38])
@settings(max_examples=1500, deadline=None)
def test_every_cut_gives_the_calls_of_the_whole(text: str, cuts: list[int]) -> None:
    whole = told(ToolParser(TOOLS), [text])
    assert told(ToolParser(TOOLS), cut(text, cuts)) == whole
    assert told(ToolParser(TOOLS), text) == whole, "one character at a time"


@given(
    st.lists(st.sampled_from(("<think>", "</think>", "\n", "<", "</", "a", " ", "think>")), max_size=12).map("".join),
    CUTS,
    st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_every_cut_gives_the_thinking_of_the_whole(text: str, cuts: list[int], opened: bool) -> None:
    whole = told(ThinkSplitter(opened=opened), [text])
    assert told(ThinkSplitter(opened=opened), cut(text, cuts)) == whole
    letters = [letter for letter in text if letter not in "\n "]
    shown = [letter for part in whole for letter in part.text if letter not in "\n "]
    marks = len(letters) - len(shown)
    assert marks in (0, len("<think>"), len("</think>"), len("<think></think>")), "nothing but marks is lost"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(["f", "none"]), st.dictionaries(st.text(max_size=5), VALUES, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["", "\n", "\n\n"]),
    CUTS,
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_calls_as_json_come_out_as_they_went_in(
    calls: list[tuple[str, dict[str, Any]]], gap: str, cuts: list[int], ascii: bool
) -> None:
    text = gap.join(
        f"<tool_call>{gap}" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii) + f"{gap}</tool_call>"
        for name, arguments in calls
    )
    events = told(ToolParser(TOOLS), cut(text, cuts))
    assert [event.name for event in events if isinstance(event, Call)] == [name for name, _ in calls]
    found = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    assert found == [arguments for _, arguments in calls]
    assert not any(isinstance(event, Content) for event in events)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "<" not in text)


@given(st.dictionaries(st.sampled_from(["n", "s", "o", "b", "unheard"]), st.none(), max_size=4), st.data(), CUTS)
@settings(max_examples=400, deadline=None)
def test_calls_as_xml_get_the_types_of_their_schema(keys: dict[str, None], data: st.DataObject, cuts: list[int]) -> None:
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "n": st.integers(),
        "b": st.booleans(),
        "s": TEXTS,
        "unheard": TEXTS,
        "o": st.dictionaries(st.text("ab", max_size=2), st.integers(), max_size=2),
    }
    arguments = {key: data.draw(kinds[key]) for key in keys}
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    text = "<tool_call>\n<function=f>\n" + "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items()
    )
    events = told(ToolParser(TOOLS), cut(text + "</function>\n</tool_call>", cuts))
    assert [type(event) for event in events] == [Call, Arguments]
    assert json.loads(events[1].text) == arguments


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "set_volume", "arguments": {"volume": 30}}\n</tool_call>',
        "<tool_call>\n<function=set_volume>\n<parameter=volume>\n30\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_a_number_keeps_its_digits(text: str, size: int) -> None:
    events = told(ToolParser(TOOLS), [text[i : i + size] for i in range(0, len(text), size)])
    assert events == [Call(0, "set_volume"), Arguments(0, '{"volume": 30}')]


def test_a_call_is_told_as_it_comes() -> None:
    for text, first in (
        ('<tool_call>{"name": "f", "arguments": {', '"s": "abc'),
        ("<tool_call><function=f>", "<parameter=s>\nabc"),
    ):
        parser = ToolParser(TOOLS)
        begun = parser.add(text)
        assert begun[0] == Call(0, "f"), "the name comes before any argument"
        assert "".join(getattr(event, "text", "") for event in [*begun[1:], *parser.add(first)]) == '{"s": "abc'


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "f"',
        "a <tool_call> b",
        '<tool_call>{"name": "unheard", "arguments": {}}</tool_call>',
        "<tool_call><function=unheard></function></tool_call>",
        '<tool_call>{"name": "f", "arguments": 5}</tool_call> and more',
        "<tool_call>\n<function=",
        "<tool_call>nothing",
        '<tool_call>{"name": f, "arguments": {}}</tool_call>',
        "text\n\n<tool_call>\n\n",
        " \n",
        "x <tool_c",
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert "".join(event.text for event in told(ToolParser(TOOLS), text) if not isinstance(event, Call)) == text
    assert not any(isinstance(event, Call) for event in told(ToolParser(TOOLS), text))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"arguments": {"s": "x"}, "name": "f"}</tool_call>', {"s": "x"}),
        ('<tool_call>{"name": "f"}</tool_call>', {}),
        ('<tool_call>{"name": "f", "arguments": "{\\"s\\": 1}"}</tool_call>', {"s": 1}),
        ('<tool_call>{"name": "f", "arguments": {"s": "x"}</tool_call>', {"s": "x"}),  # a brace too few
        ('<tool_call>{"name": "f", "arguments": {"s": "x"}}}</tool_call>', {"s": "x"}),  # and one too many
        ('<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}', {"s": "a\nb"}),  # a line end, and no mark at the end
        ('<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>', {"s": "</tool_call>"}),
        ('<tool_call>{"arguments": {"s": "\\ud800"}, "name": "f"}</tool_call>', {"s": "\ud800"}),
        ("<tool_call><function=f><parameter=s>x</function></tool_call>", {"s": "x"}),
        ("<tool_call><function=f><parameter=s>x</parameter></tool_call>", {"s": "x"}),
        ("<tool_call><function=f><parameter=s>x<parameter=n>3</parameter></function>", {"s": "x", "n": 3}),
        ("<tool_call><function=f></function></tool_call>", {}),
        ("<tool_call><function=f><parameter=b>True</parameter></function></tool_call>", {"b": True}),
        ("<tool_call><function=f><parameter=n>many</parameter></function></tool_call>", {"n": "many"}),
        ("<tool_call><function=f><parameter=s>\n\n  x\n\n</parameter></function></tool_call>", {"s": "\n  x\n"}),
    ],
)
def test_small_mistakes_are_understood(text: str, arguments: Any) -> None:
    assert [type(event) for event in told(ToolParser(TOOLS), text)] == [Call, Arguments]
    assert json.loads(told(ToolParser(TOOLS), text)[1].text) == arguments


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        ('<tool_call>{"name": "f", "arguments": {"s": "cut off', '{"s": "cut off'),
        ('<tool_call>{"name": "f", "arguments": {"n": tru}}</tool_call>', '{"n": tru}'),
        ("<tool_call><function=f><parameter=n>3", '{"n": 3'),
        ("<tool_call><function=f><parameter=s>a</para", '{"s": "a'),
        ("<tool_call><function=f><parameter=s>a</parameter></fun", '{"s": "a"'),
    ],
)
def test_a_call_that_breaks_off_is_no_json(text: str, begun: str) -> None:
    """As of OpenAI's models: a client that reads the arguments finds out, and none is made up."""
    assert told(ToolParser(TOOLS), text) == [Call(0, "f"), Arguments(0, begun)]


def test_text_around_calls() -> None:
    text = (
        "Let me see.\n\n<tool_call>{\"name\": \"none\", \"arguments\": {}}</tool_call>\n<tool_call><function=none>"
        "</function></tool_call>\n"
    )
    first, second = [Call(0, "none"), Arguments(0, "{}")], [Call(1, "none"), Arguments(1, "{}")]
    assert told(ToolParser(TOOLS), text) == [Content("Let me see."), *first, *second]
    assert told(ToolParser(TOOLS), text + "Done.\n") == [Content("Let me see."), *first, *second, Content("\nDone.")]
    parser = ToolParser(TOOLS, single=True)
    assert told(parser, [text]) == [Content("Let me see."), *first]
    assert parser.full


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({}, set()),
        (None, set()),
        (5, set()),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}]}, {"integer", "object"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/nowhere/at/all"}, set()),
        ({"type": {"a": 1}, "anyOf": 5, "$ref": 7}, set()),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    root = {"$defs": {"x": {"type": "object"}, "loop": {"allOf": [{"$ref": "#/$defs/loop"}]}}}
    assert types_of(root, schema) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("30", {"integer"}, "30"),
        ("30.0", {"integer"}, "30.0"),
        ("30.5", {"integer"}, '"30.5"'),
        ("1e400", {"number"}, "1e400"),
        ("NaN", {"number"}, '"NaN"'),
        ("null", {"string", "null"}, "null"),
        ("None", {"integer", "null"}, "null"),
        ("[1, 2]", {"array"}, "[1, 2]"),
        ("[" * 5000, {"array"}, '"' + "[" * 5000 + '"'),
        ("true", {"integer"}, '"true"'),
        ("9" * 5000, {"integer"}, '"' + "9" * 5000 + '"'),
        ("", {"integer"}, '""'),
    ],
)
def test_values(text: str, types: set[str], value: str) -> None:
    assert typed(text, frozenset(types)) == value


@pytest.mark.parametrize(
    ("opened", "text", "parts"),
    [
        (True, "a b\n</think>\n\nc", [Reasoning("a b"), Content("c")]),
        (True, "only thought", [Reasoning("only thought")]),
        (False, "<think>\na\n</think>\n\nc\n", [Reasoning("a"), Content("c\n")]),
        (False, "a <think>b</think>", [Content("a <think>b</think>")]),
        (False, "<think>\n\n</think>\n\nc", [Content("c")]),
        (True, "a\n\nb </thin", [Reasoning("a\n\nb </thin")]),
        (False, "\n c", [Content("\n c")]),
        (False, "<thi", [Content("<thi")]),
        (True, "</think>", []),
    ],
)
def test_thinking(opened: bool, text: str, parts: list[Any]) -> None:
    assert told(ThinkSplitter(opened=opened), text) == parts


@pytest.mark.parametrize(
    ("opened", "tokens", "count"),
    [
        (True, [5, 6, 2, 7, 2], 3),
        (True, [2, 7], 1),
        (True, [5], 1),
        (False, [1, 5, 2, 7], 3),
        (False, [5, 1, 2], 0),
        (False, [], 0),
    ],
)
def test_thinking_is_counted_with_its_marks(opened: bool, tokens: list[int], count: int) -> None:
    whole, parts = ThinkCount(1, 2, opened=opened), ThinkCount(1, 2, opened=opened)
    whole.add(tokens)
    for token in tokens:
        parts.add([token])
    assert whole.tokens == parts.tokens == count
