"""What `quantization_config` says of weights that are stored as FP8; knows no tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError

KNOWN = ("fp8 (with weight_block_size, or one scale for each weight or output), fbgemm_fp8, "
         "compressed-tensors with 8-bit float weights (strategy tensor, channel or block)")

_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")

Block = tuple[int, int]
"""Outputs and inputs that share a scale; 0: all there are."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """FP8 weights (e4m3fn). Which ones are is seen from how they are stored; a scale's shape is that of one of `blocks`."""

    blocks: tuple[Block, ...]
    suffix: str
    """What the name of a weight's scale adds to the weight's own."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: names under any prefix, parts of names, and `re:` expressions."""

    def ignores(self, module: str) -> bool:
        """Whether a module, by its name on disk, is one of `ignored` or inside of one. A part of a name is whole words of it:
        `gate` is not in `mlp.gate_proj`."""
        words = _bare(module).split(".")
        runs = {".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
        if not runs.isdisjoint(self._names):
            return True
        spelt = [module, *(prefix + ".".join(words) for prefix in _PREFIXES)]
        return any(pattern.match(name) for pattern in self._patterns for name in spelt)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(_bare(entry) for entry in self.ignored if not entry.startswith("re:"))

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(entry.removeprefix("re:")) for entry in self.ignored if entry.startswith("re:"))


def quantization(config: dict[str, Any], text: dict[str, Any], file: Path) -> Quantization | None:
    """None: the weights are stored as they are. Raises CheckpointError for what would be read wrongly."""
    said = config.get("quantization_config") or text.get("quantization_config")
    if not said:
        return None
    method, size = said.get("quant_method"), said.get("weight_block_size")
    blocks: Iterable[Block]
    if method == "fp8" and said.get("fmt", "e4m3") == "e4m3":
        blocks = [_block(size, file)] if size else [(0, 0), (1, 0)]
    elif method == "fbgemm_fp8":
        blocks = [(1, 0)]
    elif method == "compressed-tensors":
        blocks = _compressed(said, file)
    else:
        what = f"fmt {said['fmt']!r}" if method == "fp8" else f"quant_method {method!r}"
        raise CheckpointError(f"{file}: quantization_config: {what} is not supported; known: {KNOWN}")
    found = Quantization(blocks=tuple(dict.fromkeys(blocks)), suffix="_scale_inv" if method == "fp8" and size else "_scale",
                         ignored=tuple(str(entry) for key in ("modules_to_not_convert", "ignored_layers", "ignore")
                                       for entry in said.get(key) or ()))
    try:
        found.ignores("")
    except re.error as error:
        raise CheckpointError(f"{file}: quantization_config: {error.pattern!r} is no expression: {error}") from error
    return found


def _compressed(said: dict[str, Any], file: Path) -> list[Block]:
    """compressed-tensors: one or several groups of modules, each with its own kind of scale."""
    changed = [key for key in ("sparsity_config", "transform_config") if said.get(key)]
    groups = [group["weights"] for group in (said.get("config_groups") or {}).values() if group.get("weights")]
    right = {"num_bits": 8, "type": "float", "symmetric": True}
    blocks: dict[str, Any] = {"tensor": (0, 0), "channel": (1, 0)}
    for group in groups:
        wrong = {key: group[key] for key in right if group.get(key, right[key]) != right[key]}
        if wrong or changed or group.get("strategy") not in ("tensor", "channel", "block"):
            what = wrong or changed or f"strategy {group.get('strategy')!r}"
            raise CheckpointError(f"{file}: quantization_config: {what} is not supported; known: {KNOWN}")
    if not groups:
        raise CheckpointError(f"{file}: quantization_config: config_groups quantises no weights; known: {KNOWN}")
    return [blocks.get(group["strategy"]) or _block(group.get("block_structure"), file) for group in groups]


def _block(size: Any, file: Path) -> Block:
    if not (isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)):
        raise CheckpointError(f"{file}: quantization_config: a block is {size!r}; it must be two positive numbers, such as "
                              "[128, 128]")
    return size[0], size[1]


def _bare(name: str) -> str:
    """Without the prefixes by which checkpoints and classes differ."""
    words = name.split(".")
    while words and words[0] in ("model", "language_model"):
        del words[0]
    return ".".join(words)
