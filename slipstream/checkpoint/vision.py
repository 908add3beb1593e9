"""The vision tower's part of config.json, and the image processor's file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from slipstream.checkpoint import defaults
from slipstream.checkpoint.folder import read_json
from slipstream.checkpoint.spec import ImageConfig, VisionConfig, WindowConfig
from slipstream.errors import CheckpointError


def vision(path: Path, config: dict[str, Any] | None, architecture: str) -> VisionConfig | None:
    """Of `vision_config`; None without one. Raises CheckpointError.

    Qwen2-VL calls `embed_dim` what later models call `hidden_size`, which is its name for `out_hidden_size`.
    """
    if not config:
        return None
    config = defaults.vision(architecture, config)
    first = architecture.startswith("Qwen2VL")
    if first:
        width = int(config["embed_dim"])
        config = {**config, "out_hidden_size": config["hidden_size"], "hidden_size": width,
                  "intermediate_size": width * config.get("mlp_ratio", 4)}
    deepstack = tuple(int(block) for block in config.get("deepstack_visual_indexes") or ())
    if list(deepstack) != sorted(set(deepstack) & set(range(int(config["depth"])))):
        raise CheckpointError(f"{path / 'config.json'}: vision_config.deepstack_visual_indexes {list(deepstack)} must ascend "
                              f"within the {config['depth']} blocks")
    windows = _windows(path, config) if config.get("window_size") else None
    activation = "quick_gelu" if first else "gelu_pytorch_tanh" if windows is None else "silu"
    if config.get("hidden_act", activation) != activation:
        raise CheckpointError(f"{path / 'config.json'}: vision_config.hidden_act {config['hidden_act']!r} is not supported; "
                              f"known: {activation}")
    positions = int(config["num_position_embeddings"]) if windows is None and not first else 0
    if math.isqrt(positions) ** 2 != positions:
        raise CheckpointError(f"{path / 'config.json'}: vision_config.num_position_embeddings {positions} is not a square")
    return VisionConfig(
        depth=int(config["depth"]), hidden_size=int(config["hidden_size"]), intermediate_size=int(config["intermediate_size"]),
        num_heads=int(config["num_heads"]), patch_size=int(config["patch_size"]),
        temporal_patch_size=int(config.get("temporal_patch_size", 2)), merge_size=int(config.get("spatial_merge_size", 2)),
        out_hidden_size=int(config["out_hidden_size"]), num_position_embeddings=positions,
        in_channels=int(config.get("in_channels", 3)), deepstack=deepstack, windows=windows)


def _windows(path: Path, config: dict[str, Any]) -> WindowConfig:
    side, rest = divmod(int(config["window_size"]), int(config["patch_size"]) * int(config.get("spatial_merge_size", 2)))
    if not side or rest:
        raise CheckpointError(f"{path / 'config.json'}: vision_config.window_size {config['window_size']} must be a multiple "
                              "of patch_size * spatial_merge_size")
    return WindowConfig(side=side, full_blocks=frozenset(int(block) for block in config["fullatt_block_indexes"]))


_CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


def image(path: Path, vision: VisionConfig | None, architecture: str) -> ImageConfig | None:
    """Of the image processor's file; where that says nothing, what its class assumes, and without a file what the later models'
    say. Raises CheckpointError."""
    if vision is None:
        return None
    processor = read_json(path / "preprocessor_config.json")
    processor = processor or read_json(path / "processor_config.json").get("image_processor") or {}
    silent = not processor and not architecture.startswith("Qwen2")
    size = {"shortest_edge": 65536 if silent else 3136, "longest_edge": 16777216 if silent else 1003520,
            **(processor.get("size") or {})}
    mean, std = (processor.get(f"image_{name}", (0.5,) * 3 if silent else _CLIP[name]) for name in ("mean", "std"))
    for key, own in (("patch_size", vision.patch_size), ("merge_size", vision.merge_size)):
        if int(processor.get(key, own)) != own:
            raise CheckpointError(f"{path}: the image processor's {key} is {processor[key]}, the vision tower's {own}")
    return ImageConfig(
        min_pixels=int(processor.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(processor.get("max_pixels") or size["longest_edge"]),
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        mean=(float(mean[0]), float(mean[1]), float(mean[2])), std=(float(std[0]), float(std[1]), float(std[2])))
