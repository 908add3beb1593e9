"""`response_format` to the grammar that workers are told. Knows no model, and not whether the grammar can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import InvalidRequestError
from slipstream.text import grammar

KINDS = ("text", "json_object", "json_schema")


def response_grammar(fields: Mapping[str, Any]) -> str | None:
    """As llguidance serialises it; None: the answer is free. Raises InvalidRequestError naming the field."""
    asked = fields.get("response_format")
    if asked is None:
        return None
    if not isinstance(asked, dict) or asked.get("type") not in KINDS:
        raise InvalidRequestError(f"response_format must be an object with a type, one of {', '.join(KINDS)}",
                                  field="response_format.type")
    if asked["type"] == "text":
        return None
    for name in ("ignore_eos", "min_tokens"):
        if fields.get(name):
            raise InvalidRequestError(f"{name} cannot be kept with a response_format, which says where the answer ends",
                                      field=name)
    if asked["type"] == "json_object":
        return grammar.json_object()
    told = asked.get("json_schema")
    schema = told.get("schema") if isinstance(told, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError('response_format needs json_schema = {"name": ..., "schema": {...}}',
                                  field="response_format.json_schema")
    return grammar.json_schema(schema)
