"""Turns FP8 weights into numbers while they are read: a rank's part of a weight, by its part of the scales."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.checkpoint import Quantization
from slipstream.errors import CheckpointError
from slipstream.kernels import fp8
from slipstream.layers.linear import Piece

_SUFFIXES = ("_scale_inv", "_scale")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_UNUSED = re.compile(r".*\.(input_scale|input_scale_ub|output_scale|[qkv]_scale)")
"""Scales of activations, which are computed in the model's dtype, and of a cache."""


@dataclass(frozen=True)
class _Scales:
    values: Tensor
    """float32; along each axis the blocks that the part touches."""
    blocks: tuple[Tensor, ...]
    """Along each axis, the block of each place of the part; a single one is that of all places."""
    axis: int
    """Along which parts are cut."""

    def fill(self, stored: Tensor, into: Tensor, at: int) -> None:
        """Write the numbers of what is stored from place `at` on; one matrix after the other, so that a stack of experts needs
        no float32 copy of itself."""
        cut = [places if len(places) == 1 or axis != self.axis else places[at : at + stored.shape[axis]]
               for axis, places in enumerate(self.blocks)]
        values, stored, (*others, rows, columns) = (
            self.values.to(into.device), stored.to(into.device), (places.to(into.device) for places in cut))
        for axis, places in enumerate(others):
            values = values.index_select(axis, places)
        values = values.index_select(-1, columns)
        for matrix in itertools.product(*map(range, stored.shape[:-2])):
            into[matrix] = fp8.dequantise(stored[matrix], values[matrix].index_select(0, rows), into.dtype)


class Dequantiser:
    """Pairs weights with their scales. All names are those on disk."""

    def __init__(self, quantization: Quantization | None, names: Sequence[str]) -> None:
        """`names`: every tensor that is not left out. Raises CheckpointError for a weight with two scales."""
        self._quantization = quantization
        self.scales: dict[str, str] = {}
        """By weight."""
        held = set(names) if quantization is not None else set()
        for name in held:
            for suffix in _SUFFIXES:
                weight = name.removesuffix(suffix)
                if weight != name and weight in held and self.scales.setdefault(weight, name) != name:
                    raise CheckpointError(f"{name} and {self.scales[weight]} are scales of the same weight")
        scales = set(self.scales.values())
        self.weights = [name for name in names if name not in scales and not _UNUSED.fullmatch(name)]
        """The names that are no scale's."""
        self._scales: dict[str, _Scales] = {}

    def read(self, weight: str, file: Path, stored: Any, piece: Piece) -> None:
        """Keep what `piece` of a weight needs of its stored scale. Raises CheckpointError, naming the scale."""
        assert self._quantization is not None
        name, found = self.scales[weight], tuple(stored.get_shape())
        leading, sizes, order = (1,) * (len(piece.shape) - 2), piece.shape, -1 if piece.transposed else 1
        kinds = {tuple(-(-size // side) if side else 1 for size, side in zip(sizes, (*leading, *block[::order]), strict=True)):
                 (*leading, *block[::order]) for block in self._quantization.blocks if len(sizes) > 1}
        shape = next((kind for kind in kinds if found == kind), None) or next(
            (kind for kind in kinds if _squeezed(found) == _squeezed(kind)), None)
        if shape is None:
            raise CheckpointError(f"{name} in {file}: expected shape {' or '.join(map(str, kinds)) or 'of no scale'}, for a "
                                  f"weight of shape {sizes}, found {found}")
        whole = stored if found == shape else stored[...].reshape(shape)
        blocks, index = [], []
        for axis, (size, side) in enumerate(zip(sizes, kinds[shape], strict=True)):
            cut = piece.cut.ranges if piece.cut is not None and axis == piece.axis else (range(size),)
            touched, places = _blocks(cut, side) if side else ((range(1),), torch.zeros(1, dtype=torch.int64))
            index.append(touched)
            blocks.append(places)
        axis = piece.axis
        values = torch.cat([whole[(*(slice(None),) * axis, slice(part.start, part.stop))] for part in index[axis]], axis)
        if values.dtype not in _FLOATS:
            raise CheckpointError(f"{name} in {file} is stored as {values.dtype}; known: {', '.join(map(str, _FLOATS))}")
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise CheckpointError(f"{name} in {file} holds a scale that is negative, NaN or infinity; the file is damaged")
        self._scales[weight] = _Scales(values.float(), tuple(blocks), axis)

    def fill(self, weight: str, file: Path, stored: Tensor, into: Tensor, at: int = 0) -> None:
        """Write what a weight's stored part means; it begins at place `at` of the axis that its piece is cut along. Raises
        CheckpointError for a dtype that is not known, and where the weight, its scale and config.json contradict each other."""
        scales, quantization = self._scales.get(weight), self._quantization
        what = f"{weight} in {file} is stored as {stored.dtype}"
        if stored.dtype == fp8.E4M3 and quantization is not None:
            if quantization.ignores(weight.removesuffix(".weight")):
                raise CheckpointError(f"{what}, but quantization_config in config.json says that it is not quantised")
            if scales is None:
                raise CheckpointError(f"{what}, but its scale, {weight}{quantization.suffix}, is missing")
            scales.fill(stored, into, at)
        elif scales is not None:
            raise CheckpointError(f"{what}, but has a scale, {self.scales[weight]}")
        elif stored.dtype not in _FLOATS:
            raise CheckpointError(f"{what}; known: {', '.join(map(str, _FLOATS))}, and, with a quantization_config in "
                                  f"config.json, {fp8.E4M3}")
        else:
            into.copy_(stored)


def _blocks(cut: Iterable[range], side: int) -> tuple[tuple[range, ...], Tensor]:
    """The blocks that parts of an axis touch, and for each place the index of its block among them."""
    touched, places, before = [], [torch.zeros(0, dtype=torch.int64)], 0
    for part in cut:
        first = part.start // side
        touched.append(range(first, -(-part.stop // side)))
        places.append(torch.arange(part.start, part.stop) // side - first + before)
        before += len(touched[-1])
    return tuple(touched), torch.cat(places)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
