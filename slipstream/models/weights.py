"""Safetensors files to parameters, strictly: each is loaded exactly once, or loading stops. Knows no architecture."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint, Quantization
from slipstream.errors import CheckpointError
from slipstream.layers.linear import Part, Piece, Stack
from slipstream.models.quantized import Dequantiser
from slipstream.types import KvScales

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_MAPPED_VALUES = 16 << 20


def files_of(folder: Path) -> dict[str, Path]:
    """Tensor name -> file. With an index only the files that it names count; a stray file beside it is not read."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = dict[str, str](json.loads(index.read_text(), object_pairs_hook=_without_doubles)["weight_map"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error}") from error
        if outside := [file for file in names.values() if Path(file).name != file]:
            raise CheckpointError(f"{index} names {outside[0]!r}; shards lie beside their index")
        if absent := sorted({file for file in names.values() if not (folder / file).exists()}):
            raise CheckpointError(f"{folder / absent[0]} does not exist, but {index.name} names it; is the download complete?")
        return {name: folder / file for name, file in names.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise CheckpointError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is listed twice")
        found[key] = value
    return found


def load_into(model: nn.Module, whole: nn.Module, folder: Path, *, rename: Callable[[str], str | None], dtype: torch.dtype,
              device: torch.device, quantization: Quantization | None = None, progress: Progress | None = None) -> None:
    """Load every parameter of `model` from the folder; of one that is a Part, only its ranges are read. FP8 becomes `dtype`.

    `whole` (which may be on the meta device) has the names and shapes that the folder must hold; what `model` lacks of them is
    another rank's. `rename` maps a name on disk to a parameter's name, or None for a weight that is known to be nobody's.
    A weight that is not known is left out with a warning, unless it lies inside a part that the model has: then the model
    would compute something else without it. Raises CheckpointError with the tensor's name, file, expected and found shape for
    a missing, misshapen, doubled or non-finite weight, and for one that may not be left out.
    """
    files = files_of(folder)
    names = {disk_name: name for disk_name in files if (name := rename(disk_name)) is not None}
    dequantiser = Dequantiser(quantization, list(names))
    names = {disk_name: names[disk_name] for disk_name in dequantiser.weights}
    held = set(names.values())
    transposed = _experts_lie_transposed(whole, names, files)
    wanted = _pieces(model, held, transposed)
    shapes = {name: piece.shape for name, (_, piece) in _pieces(whole, held, transposed).items()}
    if unused := sorted(files.keys() - names - set(dequantiser.scales.values())):
        logger.info("%s: %d weights are not used by this model, such as %s", folder, len(unused), unused[0])
    unknown = sorted(disk_name for disk_name, name in names.items() if name not in shapes)
    parts = {name for name, _ in whole.named_children()}
    inside = [disk_name for disk_name in unknown if names[disk_name].partition(".")[0] in parts]
    ours = {disk_name: name for disk_name, name in names.items() if name in wanted}
    _read_scales(dequantiser, {disk_name: wanted[name][1] for disk_name, name in ours.items()}, files)
    found: dict[str, str] = {}
    for disk_name, file, stored in _stored([*ours, *unknown], files):
        if disk_name not in ours:
            continue
        name = ours[disk_name]
        if name in found:
            raise CheckpointError(f"{disk_name} ({file}) and {found[name]} are the same weight")
        shape = shapes[name]
        if tuple(stored.get_shape()) != shape:
            raise CheckpointError(f"{disk_name} in {file}: expected shape {shape}, found {tuple(stored.get_shape())}")
        parameter, piece = wanted[name]
        memory = _memory(model, parameter, dtype, device)[piece.place]
        try:
            _fill(memory, stored, piece, partial(dequantiser.fill, disk_name, file))
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {disk_name} from {file}: {error}") from error
        if not _is_finite(memory):
            raise CheckpointError(f"{disk_name} in {file} of shape {shape} holds NaN or infinity as {dtype}; "
                                  "the file is damaged, or the dtype too narrow")
        found[name] = disk_name
        if progress is not None:
            progress(len(found), len(wanted))
    if missing := sorted(wanted.keys() - found.keys()):
        named = ", ".join(f"{name} {shapes[name]}" for name in missing[:5])
        raise CheckpointError(f"{folder} lacks {len(missing)} weights: {named}{', ...' if len(missing) > 5 else ''}"
                              + (f"; it holds names that are not known, such as {unknown[0]}" if unknown else ""))
    if inside:
        raise CheckpointError(f"{folder} holds weights that this architecture does not have: {', '.join(inside[:5])}"
                              f"{', ...' if len(inside) > 5 else ''}; is config.json the right one?")
    if unknown:
        logger.warning("%s: %d weights are not known and left out, such as %s", folder, len(unknown), unknown[0])


def _read_scales(dequantiser: Dequantiser, pieces: dict[str, Piece], files: dict[str, Path]) -> None:
    """All of them before any weight: they are small, and may lie in other files. `pieces`: of this rank, by name on disk."""
    scales = {scale: weight for weight, scale in dequantiser.scales.items() if weight in pieces}
    for scale, file, stored in _stored(scales, files):
        try:
            dequantiser.read(scales[scale], file, stored, pieces[scales[scale]])
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {scale} from {file}: {error}") from error


_KV_SCALE = re.compile(r"(?:(?:model|language_model)\.)*(?P<layer>(?:mtp\.)?layers\.\d+)\.self_attn\."
                       r"(?:(?:attn\.|[kv]_proj\.)?[kv]_scale|[kv]_proj\.output_scale)")


def kv_scales(checkpoint: Checkpoint) -> KvScales:
    """The `k_scale` and `v_scale` of each layer's attention, 1 where there is none, which quantisers write beside the weights.
    Raises CheckpointError for one that is no positive number."""
    files, found = files_of(checkpoint.path), dict[tuple[str, str], float]()
    layers = {name: match["layer"] for name in files if (match := _KV_SCALE.fullmatch(name))}
    for name, file, stored in _stored(layers, files):
        scale, key = stored[...].float(), (layers[name], "v" if re.search(r"\.v_(scale|proj\.output)", name) else "k")
        if scale.numel() != 1 or not 0 < float(scale) < math.inf:
            raise CheckpointError(f"{name} in {file} is {scale.tolist()}; known: one positive number")
        if found.setdefault(key, float(scale)) != float(scale):
            raise CheckpointError(f"{name} in {file} is {float(scale)}; another scale of the same is {found[key]}")
    return tuple((found.get((layer.name, "k"), 1.0), found.get((layer.name, "v"), 1.0)) for layer in checkpoint.layers)


def _stored(names: Iterable[str], files: dict[str, Path]) -> Iterator[tuple[str, Path, Any]]:
    """(name, its file, what safetensors calls a slice: shape and content, read where it is indexed)."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, names in by_file.items():
        with _open(path) as file:
            inside = set(file.keys())
        if doubled := sorted(name for name in inside if files.get(name, path) != path):
            raise CheckpointError(f"{doubled[0]} is in {path} and, by the index, in {files[doubled[0]]}")
        if absent := [name for name in names if name not in inside]:
            raise CheckpointError(f"the index says that {absent[0]} is in {path}, but it is not")
        waiting = list(reversed(names))
        while waiting:  # what is read of a mapped file counts as memory until the file is closed
            mapped = 0
            with _open(path) as file:
                while waiting and mapped < _MAPPED_VALUES:
                    stored = file.get_slice(waiting[-1])
                    yield waiting.pop(), path, stored
                    mapped += math.prod(stored.get_shape())


def _experts_lie_transposed(whole: nn.Module, names: dict[str, str], files: dict[str, Path]) -> bool:
    """True where a Stack that is not square has its other shape on disk. The last that tells is asked: a down_proj, unless that
    is square; then the gate_up_proj is not."""
    disk_names = {name: disk_name for disk_name, name in names.items()}
    for name, parameter in reversed(list(whole.named_parameters())):
        if isinstance(parameter, Stack) and name in disk_names and parameter.shape[1] != parameter.shape[2]:
            _, _, stored = next(_stored([disk_names[name]], files))
            return tuple(stored.get_shape())[1:] == parameter.transposed().shape[1:]
    return False


def _pieces(model: nn.Module, held: Container[str], transposed: bool) -> dict[str, tuple[str, Piece]]:
    """Every tensor that must be `held`, by name: the parameter that it fills, and where. A Stack may lie in pieces."""
    found: dict[str, tuple[str, Piece]] = {}
    for name, parameter in model.named_parameters():
        pieces = parameter.pieces(name.rpartition(".")[0]) if isinstance(parameter, Stack) else {}
        if isinstance(parameter, Stack) and transposed:
            pieces = {name: parameter.transposed()}
        elif not any(piece in held for piece in pieces):
            pieces = {name: parameter.piece() if isinstance(parameter, Part) else Piece(tuple(parameter.shape))}
        found |= {piece: (name, where) for piece, where in pieces.items()}
    return found


def _fill(memory: Tensor, stored: Any, piece: Piece, write: Callable[[Tensor, Tensor, int], None]) -> None:
    """`write` what the rank takes of a stored tensor, and nothing else, to where it belongs: (stored part, its place, at)."""
    before, axis = (slice(None),) * piece.axis, piece.axis
    target = memory.transpose(-1, -2) if piece.transposed else memory
    at = 0
    for part in piece.cut.ranges if piece.cut is not None else (None,):
        source: Tensor = stored[:] if part is None else stored[(*before, slice(part.start, part.stop))]
        place = target if part is None else target.narrow(axis, at, len(part))
        write(source, place, at)
        at += len(part or ())


def _is_finite(tensor: Tensor) -> bool:
    """NaN is the least and the greatest of whatever it is among."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error


def _memory(model: nn.Module, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter's own memory, which is made when its first piece comes. It is whole when no piece is missing."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if module.get_parameter(leaf).is_meta:
        empty = torch.empty(module.get_parameter(leaf).shape, dtype=dtype, device=device)
        setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
    return module.get_parameter(leaf).data
