"""The form that an answer is asked to have, as a grammar. Knows no model, and not whether the grammar can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.structured import Structure
from slipstream.errors import InvalidRequestError
from slipstream.text import grammar


def grammar_of(structure: Structure | None, fields: Mapping[str, Any]) -> str | None:
    """As llguidance serialises it; None: the answer is free. Raises InvalidRequestError for what cannot be kept beside it."""
    if structure is None:
        return None
    for name in ("ignore_eos", "min_tokens"):
        if fields.get(name):
            raise InvalidRequestError(f"{name} cannot be kept with a {structure.field}, which says where the answer ends",
                                      field=name)
    return grammar.json_object() if structure.schema is None else grammar.json_schema(structure.schema)
