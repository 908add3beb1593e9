"""Safetensors files to parameters, strictly: each is loaded exactly once, or loading stops. Knows no architecture."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from slipstream.errors import CheckpointError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_STORED = (torch.float32, torch.bfloat16, torch.float16)


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


def load_into(model: nn.Module, folder: Path, *, rename: Callable[[str], str | None], dtype: torch.dtype, device: torch.device,
              progress: Progress | None = None) -> None:
    """Load every parameter of `model` from the folder.

    `rename` maps a name on disk to a parameter's name, or None for a weight that is not ours to load. Raises CheckpointError
    with the tensor's name, file, expected and found shape for a missing, misshapen, doubled, unknown or non-finite weight.
    """
    wanted = dict(model.named_parameters())
    found: dict[str, str] = {}
    unknown: list[str] = []
    files = files_of(folder)
    if unused := sorted(name for name in files if rename(name) is None):
        logger.info("%s: %d weights are not used by this model, such as %s", folder, len(unused), unused[0])
    for done, (disk_name, file, tensor) in enumerate(_tensors(files, rename)):
        name = rename(disk_name)
        assert name is not None
        if name not in wanted:
            unknown.append(disk_name)
            continue
        if name in found:
            raise CheckpointError(f"{disk_name} ({file}) and {found[name]} are the same weight")
        shape = tuple(wanted[name].shape)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{disk_name} in {file}: expected shape {shape}, found {tuple(tensor.shape)}")
        if tensor.dtype not in _STORED:
            raise CheckpointError(f"{disk_name} in {file} of shape {shape} is stored as {tensor.dtype}; known: "
                                  f"{', '.join(str(known) for known in _STORED)}")
        converted = tensor.to(device=device, dtype=dtype)
        if not bool(torch.isfinite(converted).all()):
            raise CheckpointError(f"{disk_name} in {file} of shape {shape} holds NaN or infinity as {dtype}; "
                                  "the file is damaged, or the dtype too narrow")
        _assign(model, name, converted)
        found[name] = disk_name
        if progress is not None:
            progress(done + 1, len(wanted))
    if missing := sorted(wanted.keys() - found.keys()):
        shapes = ", ".join(f"{name} {tuple(wanted[name].shape)}" for name in missing[:5])
        raise CheckpointError(f"{folder} lacks {len(missing)} weights: {shapes}{', ...' if len(missing) > 5 else ''}"
                              + (f"; it holds names that are not known, such as {unknown[0]}" if unknown else ""))
    if unknown:
        raise CheckpointError(f"{folder} holds weights that this architecture does not have: {', '.join(sorted(unknown)[:5])}"
                              f"{', ...' if len(unknown) > 5 else ''}; is config.json the right one?")


def _tensors(files: dict[str, Path], rename: Callable[[str], str | None]) -> Iterator[tuple[str, Path, Tensor]]:
    by_file: dict[Path, list[str]] = {}
    for name, path in files.items():
        if rename(name) is not None:
            by_file.setdefault(path, []).append(name)
    for path, names in by_file.items():
        with _open(path) as file:
            inside = set(file.keys())
            if doubled := sorted(name for name in inside if files.get(name, path) != path):
                raise CheckpointError(f"{doubled[0]} is in {path} and, by the index, in {files[doubled[0]]}")
            for name in names:
                if name not in inside:
                    raise CheckpointError(f"the index says that {name} is in {path}, but it is not")
                try:
                    tensor = file.get_tensor(name)
                except SafetensorError as error:
                    raise CheckpointError(f"cannot read {name} from {path}: {error}") from error
                yield name, path, tensor


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Parameter(tensor, requires_grad=False))
