"""What the form of an answer is asked to be. Knows no grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.fields import as_object
from slipstream.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A form that every answer of a request must have."""

    schema: Mapping[str, Any] | None = None
    """JSON that this JSON schema allows; None: any JSON object."""
    tool: str | None = None
    """A call of this tool; empty: a call of any; None: no call is asked for."""
    strict_tools: frozenset[str] = frozenset()
    """Calls of these hold what their schemas allow, if there are any."""
    field: str
    """Of the body, that asks for it."""


def response_format(value: Any, field: str) -> Structure | None:
    """None for plain text. `field` says where `value` stands. Raises InvalidRequestError naming the part at fault."""
    if value is None:
        return None
    form = as_object(value, field)
    kind = form.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(f"{field}.type must be text, json_object or json_schema", field=f"{field}.type")
    if unknown := [name for name in form if name not in known]:
        raise InvalidRequestError(f"unknown field {field}.{unknown[0][:64]}; a schema stands in {field}.json_schema.schema",
                                  field=f"{field}.{unknown[0][:64]}")
    if kind != "json_schema":
        return None if kind == "text" else Structure(field=field)
    where = f"{field}.json_schema"
    described = as_object(form.get("json_schema"), where)
    return Structure(schema=as_object(described.get("schema"), f"{where}.schema"), field=field)


def refuse_tools(structure: Structure | None) -> None:
    """Raises InvalidRequestError for a structure of calls, which cannot be kept yet."""
    if structure is not None:
        raise InvalidRequestError(f"this value of {structure.field} needs calls of a given form, which is not available yet; "
                                  "leave it out", field=structure.field)
