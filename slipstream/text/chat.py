"""A checkpoint's chat template, rendered in jinja2's sandbox; knows no token and no picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import CheckpointError, InvalidRequestError


class ChatTemplate:
    """Messages in OpenAI's form, pictures as `{"type": "image"}` parts -> the prompt's text."""

    def __init__(self, folder: Path, quote: Callable[[str], str]) -> None:
        """`quote` is applied to every text of messages and tools (see Tokenizer.quote).

        Raises CheckpointError if there is no template or it does not compile.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, autoescape=False,
                                                    extensions=["jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _tojson
        self._quote = quote
        try:
            source = _source(folder)
            self._template = environment.from_string(source)
            self.names = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            """Values that it asks for."""
            self.thinks = "</think>" in source
            """The model may think before it answers, between `<think>` and `</think>`."""
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template of {folder} does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
               values: Mapping[str, Any] | None = None) -> str:
        """The prompt, up to where the assistant's answer starts. `values`: of other names that the template knows.

        Raises InvalidRequestError with the template's own words when it refuses the messages.
        """
        given = {**(values or {}), "messages": messages, **({"tools": tools} if tools else {})}
        try:
            return self._template.render(self._quoted(given), add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidRequestError(f"the chat template refused the messages: {error}", field="messages") from error

    def _quoted(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._quote(value)
        if isinstance(value, Mapping):
            return {self._quote(key): self._quoted(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._quoted(item) for item in value]
        return value


def _source(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    try:
        if path.exists():
            return path.read_text()
        template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the chat template of {folder}: {error}") from error
    if isinstance(template, list):  # named templates: the default one
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise CheckpointError(f"{folder} has no chat template: neither chat_template.jinja nor a chat_template in "
                              "tokenizer_config.json; add one")
    return template


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
