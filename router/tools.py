"""Calls of tools, as Qwen models write them, to names and JSON arguments. Pure; knows no request.

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>                                    Qwen3
    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>                       Qwen3.5

Each call's own beginning says which form it has. A call is told as it comes: its name, then pieces of its arguments. However
the text is cut, the pieces joined are the same. Nothing is lost: what does not begin as a call of a known tool stays text, mark
and all; of a call that breaks off, or whose JSON is wrong after its arguments began, they are what the model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.reasoning import Content, live

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END = "<function=", "</function>"
_PARAMETER, _VALUE_END = "<parameter=", "</parameter>"
_HEAD = re.compile(r'\s*\{\s{0,64}"name"\s{0,64}:\s{0,64}("(?:[^"\\]|\\.){0,256}")\s{0,64},\s{0,64}"(?:arguments|parameters)"'
                   r'\s{0,64}:\s{0,64}(?=\{)')
_MAX_NAME = 256
_TYPES: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
                                       "object": (dict,), "array": (list,)}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NOTHING = object()

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True)
class Call:
    """A call begins."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments."""

    index: int
    text: str


Event = Content | Call | Arguments


class ToolParser:
    """One choice's answer as text and calls."""

    def __init__(self, tools: Schemas, *, single: bool = False) -> None:
        """`single`: what follows the first call is nothing."""
        self.calls = 0
        """Calls that have begun."""
        self.full = False
        """Nothing more can come."""
        self._tools = tools
        self._single = single
        self._events: list[Event] = []
        self._rest = ""  # not understood yet
        self._scanned = 0  # characters of it that are known to hold no end
        self._gap = ""  # white space that is dropped if a call, or nothing, follows
        self._final = False
        self._step: Callable[[], bool] = self._text
        self._schema: Mapping[str, Any] = {}
        self._depth, self._quoted, self._escaped = 0, False, False  # where in a call's JSON we are
        self._types: frozenset[str] = frozenset()  # of the parameter
        self._separator = ""
        self._fresh = True  # nothing of the parameter's value has come

    def add(self, text: str) -> list[Event]:
        """What is known now."""
        self._rest += text
        while self._step():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The text ended."""
        self._final = True
        return self.add("")

    # Steps: each takes something off the rest and says whether another can follow; False: more text is needed ---------------

    def _text(self) -> bool:
        before, mark, after = self._rest.partition(OPEN)
        if mark:
            self._say(before)
            self._rest, self._step = after, self._open
            return True
        keep = 0 if self._final else live(self._rest, (OPEN,))
        self._say(self._take(len(self._rest) - keep))
        if self._final and self._gap and not self.calls:
            self._events.append(Content(self._gap))
        return False

    def _open(self) -> bool:
        rest, self._scanned = self._rest.lstrip(), 0
        if rest.startswith("{"):
            self._step = self._head
            return True
        name, end, after = rest.removeprefix(_FUNCTION).partition(">")
        if rest.startswith(_FUNCTION) and end and name.strip() in self._tools:
            self._begin(name.strip(), "{")
            self._rest, self._step, self._separator = after, self._parameters, ""
        elif end or self._final or len(name) > _MAX_NAME or not (_FUNCTION.startswith(rest) or rest.startswith(_FUNCTION)):
            self._no_call()
        else:
            return False
        return True

    def _no_call(self) -> None:
        self._say(OPEN)
        self._step = self._text

    def _begin(self, name: str, arguments: str) -> None:
        self._gap, self._schema = "", self._tools[name]
        self._events.append(Call(self.calls, name))
        self.calls += 1
        self._argue(arguments)

    def _end(self) -> None:
        self.full = self._single
        self._step = self._over if self._single else self._close

    def _over(self) -> bool:
        self._rest = ""
        return False

    def _close(self) -> bool:
        """After the arguments: white space and braces that are too many, then the mark; it may be missing."""
        rest = self._rest.lstrip(" \t\r\n}")
        begins = CLOSE.startswith(rest)
        if begins and rest != CLOSE and not self._final:
            self._rest = rest
            return False
        self._rest, self._step = "" if begins else rest.removeprefix(CLOSE), self._text
        return True

    def _say(self, text: str) -> None:
        text = self._gap + text
        shown = text.rstrip()
        self._gap = text[len(shown):]
        if shown:
            self._events.append(Content(shown))

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self.calls - 1, text))

    def _take(self, count: int) -> str:
        taken, self._rest, self._scanned = self._rest[:count], self._rest[count:], 0
        return taken

    def _first(self, marks: Sequence[str]) -> tuple[int, str]:
        """Where the first mark of the rest stands, and which; -1 for none."""
        start = max(0, self._scanned - max(map(len, marks)))
        found = [(at, mark) for mark in marks if (at := self._rest.find(mark, start)) >= 0]
        self._scanned = 0 if found else len(self._rest)
        return min(found, default=(-1, ""))

    # The JSON form

    def _head(self) -> bool:
        if head := _HEAD.match(self._rest):
            if (name := _loads(head[1])) in self._tools:
                self._take(head.end())
                self._begin(name, "")
                self._step = self._arguments
            else:
                self._no_call()
            return True
        end, _ = self._first((CLOSE,))  # no plain beginning: the whole call is needed to know what it is
        if end < 0 and not self._final:
            return False
        body = _loads(self._rest if end < 0 else self._rest[:end], strict=False)
        name, arguments = (body.get("name"), body.get("arguments") or {}) if isinstance(body, dict) else (None, None)
        text = arguments if isinstance(arguments, str) else _dumps(arguments)
        if isinstance(name, str) and name in self._tools and isinstance(_loads(text), dict):
            self._take(len(self._rest) if end < 0 else end)
            self._begin(name, text)
            self._end()
        else:
            self._no_call()
        return True

    def _arguments(self) -> bool:
        """As the model writes them, up to the brace that ends them; line ends inside a text are escaped, as JSON wants it."""
        written: list[str] = []
        for letter in self._rest:
            written.append(_dumps(letter)[1:-1] if self._quoted and letter < " " else letter)
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            else:
                self._quoted = letter == '"'
                self._depth += (letter in "{[") - (letter in "]}")
                if self._depth == 0:
                    self._end()
                    break
        self._take(len(written))
        self._argue("".join(written))
        return self._step != self._arguments

    # The XML-like form

    def _parameters(self) -> bool:
        marks = (_PARAMETER, _END, CLOSE)
        at, mark = self._first(marks)
        if at < 0:
            self._say(self._take(len(self._rest) - live(self._rest, marks)))  # what nobody expects here is text
            return False
        self._say(self._take(at))
        self._gap = ""
        if mark != _PARAMETER:
            self._take(len(mark) if mark == _END else 0)
            self._argue("}")
            self._end()
            return True
        key, end, after = self._rest[len(mark):].partition(">")
        if not end:
            return False
        properties = self._schema.get("properties")
        schema = properties.get(key.strip()) if isinstance(properties, Mapping) else None
        self._types = types_of(self._schema, schema)
        self._rest, self._step, self._fresh = after, self._value, True
        self._argue(f"{self._separator}{_dumps(key.strip())}: " + ('"' if self._streams else ""))
        self._separator = ", "
        return True

    @property
    def _streams(self) -> bool:
        """A text is told as it comes; another value when it is complete."""
        return self._types <= {"string"}

    def _value(self) -> bool:
        if self._fresh and self._rest:
            self._fresh = False
            self._rest = self._rest.removeprefix("\n")
        marks = (_VALUE_END, _PARAMETER, _END, CLOSE)
        at, _ = self._first(marks)
        if at >= 0:
            value = self._take(at).removesuffix("\n")
            self._argue(_dumps(value)[1:] if self._streams else typed(value, self._types))
            self._rest, self._step = self._rest.removeprefix(_VALUE_END), self._parameters
            return True
        if self._streams or self._final:
            value = self._take(len(self._rest) - live(self._rest, [*marks, *("\n" + mark for mark in marks)]))
            self._argue(_dumps(value)[1:-1] if self._streams else value)
        return False


def types_of(root: Mapping[str, Any], schema: Any) -> frozenset[str]:
    """The JSON types that a part of the schema `root` allows; empty: it does not say."""
    found: set[str] = set()
    seen: set[int] = set()
    todo = [schema]
    while todo:
        one = todo.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        kinds = one.get("type")
        found.update(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        for name in ("anyOf", "oneOf", "allOf"):
            todo += options if isinstance(options := one.get(name), list) else []
        if isinstance(path := one.get("$ref"), str):
            target: Any = root
            for part in path.split("/")[1:]:
                target = target.get(part) if isinstance(target, Mapping) else None
            todo.append(target)
    return frozenset(found)


def typed(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON of one of the types; what is none of them becomes a string."""
    word = _WORDS.get(text.strip(), text.strip())
    value = _loads(word)
    kinds = {kind for name in types for kind in _TYPES.get(name, ())}
    fits = type(value) in kinds or ("integer" in types and isinstance(value, float) and value.is_integer())
    return word if fits else _dumps(text)


def _loads(text: str, *, strict: bool = True) -> Any:
    try:
        return json.loads(text, strict=strict, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _NOTHING


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _dumps(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can say
        return json.dumps(value)
    return text
