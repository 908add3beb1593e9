"""The tools of a chat request to checked ones; knows no model. A refusal names its field, and never echoes input."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.fields import as_object, boolean
from router.structured import Structure
from slipstream.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_TOOLS_CHARACTERS = 1 << 20
"""Of all tools together, as JSON."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What the model may call."""

    shown: tuple[dict[str, Any], ...] = ()
    """As the template takes them; empty: none, and nothing in the answer is a call."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of their arguments, by name."""
    single: bool = False
    """One call at most."""
    structure: Structure | None = None
    """What the calls have to be."""


def tools(fields: Mapping[str, Any]) -> Tools:
    """Raises InvalidRequestError naming the field."""
    given = fields.get("tools") or []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must be a list of at most {MAX_TOOLS} tools", field="tools")
    shown = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    try:
        size = sum(len(json.dumps(tool, ensure_ascii=False)) for tool in shown)
    except RecursionError:
        raise InvalidRequestError("tools are nested too deeply", field="tools") from None
    if size > MAX_TOOLS_CHARACTERS:
        raise InvalidRequestError(f"tools are longer than {MAX_TOOLS_CHARACTERS} characters of JSON", field="tools")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in shown}
    if len(schemas) < len(shown):
        raise InvalidRequestError("tools: two functions have one name", field="tools")
    wanted = _choice(fields.get("tool_choice"), schemas)
    if wanted == "none" or not shown:
        return Tools()
    strict = frozenset(tool["function"]["name"] for tool in given if tool["function"].get("strict"))
    structure = Structure(strict_tools=strict, field="tools") if strict else None
    if wanted != "auto":
        structure = Structure(tool="" if wanted == "required" else wanted[1], strict_tools=strict, field="tool_choice")
    single = fields.get("parallel_tool_calls") is not None and not boolean(fields, "parallel_tool_calls")
    return Tools(shown=tuple(shown), schemas=schemas, single=single, structure=structure)


def _tool(value: Any, where: str) -> dict[str, Any]:
    tool = as_object(value, where)
    if tool.get("type") != "function":
        raise InvalidRequestError(f"{where}.type must be function", field=f"{where}.type")
    function = as_object(tool.get("function"), f"{where}.function")
    name, about = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{where}.function.name must be 1 to 128 letters, digits, _, -, . or :",
                                  field=f"{where}.function.name")
    if about is not None and not isinstance(about, str):
        raise InvalidRequestError(f"{where}.function.description must be a string", field=f"{where}.function.description")
    parameters = function.get("parameters")
    parameters = {"type": "object", "properties": {}} if parameters is None else as_object(parameters,
                                                                                           f"{where}.function.parameters")
    boolean(function, "strict", f"{where}.function.")
    return {"type": "function", "function": {"name": name, "description": about or "", "parameters": parameters}}


def _choice(value: Any, schemas: Mapping[str, Any]) -> Any:
    """`none`, `auto`, `required`, or ("function", its name)."""
    if value is None:
        return "auto"
    name = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = name.get("name") if isinstance(name, dict) else None
    if value not in ("none", "auto", "required") and not isinstance(name, str):
        raise InvalidRequestError('tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}',
                                  field="tool_choice")
    if (isinstance(name, str) and name not in schemas) or (value == "required" and not schemas):
        raise InvalidRequestError("tool_choice asks for a tool that is not among tools", field="tool_choice")
    return ("function", name) if isinstance(name, str) else value
