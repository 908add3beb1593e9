"""Plain data, as TOML gives it, to typed sections: dataclasses, enums, and the types that a TOML value can have. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}


def assign(data: dict[str, Any], override: str) -> None:
    """Put one `section.key=value` into `data`; the value is TOML, a bare word a string. Raises ConfigError."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"--set {override}: write it as section.key=value, for example engine.block_size=32")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, key = path.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override}: {section} is a value, not a section")
    data[key] = value


def build(kind: Any, data: Any, path: str, where: str) -> Any:
    """`data`, from `where`, as an instance of the dataclass or type `kind`. Raises ConfigError that names `path`."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path} in {where} must be a section, not {data!r}", field=path)
        hints = typing.get_type_hints(kind)
        names = {f.name for f in dataclasses.fields(kind)}
        for key in data:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
                hint = f"did you mean {_join(path, near[0])}?" if near else f"known keys: {', '.join(sorted(names))}"
                raise ConfigError(f"unknown key {_join(path, key)} in {where}; {hint}", field=_join(path, key))
        values = {key: build(hints[key], value, _join(path, key), where) for key, value in data.items()}
        required = [f.name for f in dataclasses.fields(kind)
                    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
        for name in required:
            if name not in values:
                raise ConfigError(f"{_join(path, name)} is missing in {where}", field=_join(path, name))
        return kind(**values)
    origin = typing.get_origin(kind)
    if origin is dict:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{path} in {where} must be a section, not {data!r}", field=path)
        _, item = typing.get_args(kind)
        if item is str:  # an environment: 4 is what `--set pools.decode.env.THREADS=4` gives
            data = {key: str(value) if type(value) is int else value for key, value in data.items()}
        return {key: build(item, value, _join(path, key), where) for key, value in data.items()}
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise ConfigError(f"{path} in {where} must be a list, not {data!r}", field=path)
        return tuple(build(typing.get_args(kind)[0], value, path, where) for value in data)
    assert not isinstance(kind, types.UnionType), "no field of a section is a union"
    return _scalar(kind, data, path, where)


def _scalar(kind: Any, data: Any, path: str, where: str) -> Any:
    if issubclass(kind, enum.Enum):
        known = [each.value for each in kind]
        check_name(data, known, path)
        return kind(data)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is not bool and isinstance(data, bool)):
        raise ConfigError(f"{path} in {where} must be {_WORDS[kind]}, not {data!r}", field=path)
    if kind is float and not math.isfinite(data):
        raise ConfigError(f"{path} in {where} must be finite, not {data}", field=path)
    return data


def check_name(data: Any, known: Sequence[str], path: str) -> None:
    """Raises ConfigError for what is not among `known`, with the closest one."""
    if data not in known:
        near = difflib.get_close_matches(str(data), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{path} must be one of {', '.join(known)}, not {data!r}{hint}", field=path)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
