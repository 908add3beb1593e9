"""The fields of a body to checked values. A refusal names its field, and never echoes input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import InvalidRequestError


def as_object(value: Any, field: str) -> dict[str, Any]:
    """Raises InvalidRequestError for anything else."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{field} must be a JSON object", field=None if field == "the body" else field)
    return value


def as_text(value: Any, field: str) -> str:
    """Raises InvalidRequestError for anything else."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{field} must be a string", field=field)
    return value


def boolean(fields: Mapping[str, Any], name: str, prefix: str = "") -> bool:
    """False where it is not given."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{prefix}{name} must be true or false", field=prefix + name)
    return bool(value)


def integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """None where it is not given."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}", field=name)
    return value


def number(fields: Mapping[str, Any], name: str, low: float, high: float, open_low: bool = False) -> float | None:
    """None where it is not given."""
    value = fields.get(name)
    if value is None:
        return None
    # The range comes first: an integer of 400 digits is no float, and NaN is in no range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high \
            or (open_low and value == low):
        raise InvalidRequestError(f"{name} must be a number {'above' if open_low else 'from'} {low:g} "
                                  f"{'and up to' if open_low else 'to'} {high:g}", field=name)
    return float(value)
