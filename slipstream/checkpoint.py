"""What a checkpoint folder declares (config.json and its neighbours); knows no tensor and no tokenizer."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.types import AttentionLayer, LayerSpec, LinearLayer, SamplingParams


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of the language model."""

    theta: float
    rotary_size: int
    """Leading channels of a head that are rotated; the rest passes through."""
    mrope_section: tuple[int, int, int] | None
    """Frequency pairs driven by t, h, w; None: one-dimensional positions."""
    mrope_interleaved: bool


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture of experts."""

    count: int
    top_k: int
    """Experts of each token."""
    intermediate_size: int
    """Of each expert."""
    shared_size: int
    """Intermediate size of the expert that every token takes; 0: there is none."""
    normalise: bool
    """The weights of a token's experts add up to 1."""
    layers: frozenset[int]
    """The layers that have experts; the others are dense."""


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """Attention inside windows of a picture (Qwen2.5-VL)."""

    side: int
    """Merged patches along each side of a window."""
    full_blocks: frozenset[int]
    """Blocks that attend to the whole picture all the same."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower (Qwen2.5-VL, Qwen3-VL and Qwen3.5)."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    """Of the learned square table; 0 with windows, where positions are rotary alone."""
    in_channels: int
    deepstack: tuple[int, ...]
    """Blocks whose outputs are merged too: that of the i-th is added to the language model's hidden states after layer i."""
    windows: WindowConfig | None


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Image preprocessing (preprocessor_config.json)."""

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def factor(self) -> int:
        """Pixels per merged patch: both sides of a resized image are multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that config.json, generation_config.json and preprocessor_config.json say and that we use."""

    path: Path
    architecture: str
    dtype: str
    """Of the weights on disk: `float32`, `bfloat16` or `float16`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the dense layers; 0: there are none."""
    experts: ExpertConfig | None
    num_heads: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool
    attention_bias: bool
    max_context: int
    eos_token_ids: frozenset[int]
    sampling: SamplingParams
    """generation_config.json: how tokens are drawn for a request that does not say; temperature 0 with `do_sample: false`."""
    vision: VisionConfig | None
    image: ImageConfig | None
    image_token_id: int | None
    video_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None

    @property
    def has_linear_layers(self) -> bool:
        """True for hybrid models: a sequence then owns a state slot beside its blocks."""
        return any(isinstance(layer, LinearLayer) for layer in self.layers)

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Of the dense layers, of the experts and of the shared expert, as far as there are any."""
        experts = self.experts
        sizes = (self.intermediate_size, *((experts.intermediate_size, experts.shared_size) if experts else ()))
        return tuple(size for size in sizes if size)

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """None: the layer is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None


def read(path: Path) -> Checkpoint:
    """Parse a checkpoint folder. Raises CheckpointError naming the file and key that is missing or wrong."""
    config = _json(path / "config.json", required=True)
    try:
        return _parse(path, config)
    except KeyError as error:
        raise CheckpointError(f"{path / 'config.json'}: `{error.args[0]}` is missing") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path / 'config.json'} holds a value of the wrong kind: {error}") from error


def _parse(path: Path, config: dict[str, Any]) -> Checkpoint:
    text = config.get("text_config") or config
    architecture = (config.get("architectures") or [""])[0]
    if not architecture:
        raise CheckpointError(f"{path / 'config.json'}: `architectures` is missing")

    _refuse_unsupported(path, config, text)

    def need(section: dict[str, Any], key: str) -> Any:
        if section.get(key) is None:
            raise CheckpointError(f"{path / 'config.json'}: `{key}` is missing")
        return section[key]

    heads = int(need(text, "num_attention_heads"))
    hidden = int(need(text, "hidden_size"))
    head_size = int(text.get("head_dim") or hidden // heads)
    # A text-only class may be named over a config that also describes a tower: it is then served without pictures.
    vision = None if architecture.endswith("ForCausalLM") else _vision(path, config.get("vision_config"))
    generation = _json(path / "generation_config.json")
    eos = generation.get("eos_token_id", text.get("eos_token_id", config.get("eos_token_id")))
    eos_ids = frozenset(int(i) for i in (eos if isinstance(eos, list) else [eos]) if i is not None)
    layers = _layers(text, heads, head_size)
    if vision is not None and len(vision.deepstack) > len(layers):
        raise CheckpointError(f"{path / 'config.json'}: vision_config.deepstack_visual_indexes names {len(vision.deepstack)} "
                              f"blocks, one for each of the first layers, but there are {len(layers)} layers")
    experts = _experts(text)
    dense = experts is None or len(experts.layers) < int(need(text, "num_hidden_layers"))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    return Checkpoint(
        path=path,
        architecture=architecture,
        dtype=dtype,
        vocab_size=int(need(text, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(need(text, "intermediate_size")) if dense else 0,
        experts=experts,
        num_heads=heads,
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope=_rope(text, head_size, path),
        layers=layers,
        tie_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        attention_bias=bool(text.get("attention_bias", False)),
        max_context=int(text.get("max_position_embeddings", 32768)),
        eos_token_ids=eos_ids,
        sampling=_sampling(path / "generation_config.json", generation),
        vision=vision,
        image=_image(path, vision),
        image_token_id=config.get("image_token_id") if vision else None,
        video_token_id=config.get("video_token_id") if vision else None,
        vision_start_token_id=config.get("vision_start_token_id") if vision else None,
        vision_end_token_id=config.get("vision_end_token_id") if vision else None,
    )


_SAMPLING = {"temperature": (0.0, 2.0), "top_p": (1e-6, 1.0), "top_k": (-1, 1 << 31), "min_p": (0.0, 1.0),
             "repetition_penalty": (1e-6, 10.0)}


def _sampling(file: Path, generation: dict[str, Any]) -> SamplingParams:
    said = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    found: dict[str, Any] = {"temperature": 1.0, **said}
    for name, value in found.items():
        low, high = _SAMPLING[name]
        if type(value) not in (int, float) or not low <= value <= high:
            raise CheckpointError(f"{file}: {name} is {value!r}; it must be a number from {low:g} to {high:g}")
    found["top_k"] = max(0, int(found.get("top_k", 0)))
    return SamplingParams(**found | ({} if generation.get("do_sample", True) else {"temperature": 0.0}))


def _refuse_unsupported(path: Path, config: dict[str, Any], text: dict[str, Any]) -> None:
    """What would load and then compute something else."""
    file = path / "config.json"
    if config.get("quantization_config") or text.get("quantization_config"):
        raise CheckpointError(f"{file}: quantization_config is not supported; use the bfloat16 checkpoint")
    if text.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{file}: hidden_act {text['hidden_act']!r} is not supported; known: silu")
    if text.get("attn_output_gate") is False and text.get("linear_num_key_heads"):
        raise CheckpointError(f"{file}: attn_output_gate false is not supported; Qwen3.5 gates its attention")
    if text.get("use_sliding_window"):
        raise CheckpointError(f"{file}: use_sliding_window is not supported; every layer attends to the whole context")


def _json(path: Path, required: bool = False) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        if required:
            raise CheckpointError(f"{path} does not exist; give model.path a checkpoint folder with a config.json") from error
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return data


def _rope(text: dict[str, Any], head_size: int, path: Path) -> RopeConfig:
    """Both spellings: `rope_parameters`, and top-level `rope_theta` with `rope_scaling`.

    M-RoPE is keyed on the section, never on the type's name: Qwen3.5 says `default`. Where keys are left out, Qwen3.5,
    Qwen3-Next and Qwen3-VL interleave the axes, and all but Qwen3-VL rotate a quarter of each head.
    """
    family = str(text.get("model_type", ""))
    hybrid = family.startswith(("qwen3_5", "qwen3_next"))
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"{path / 'config.json'}: rope type {kind!r} is not supported; known: default, mrope")
    theta = rope.get("rope_theta", text.get("rope_theta", 10000.0))
    fraction = float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25 if hybrid else 1.0)))
    section = rope.get("mrope_section")
    rotary = int(head_size * fraction)
    if section is not None and (len(section) != 3 or sum(section) != rotary // 2):
        raise CheckpointError(f"{path / 'config.json'}: mrope_section {section} must be three numbers that add up to "
                              f"{rotary // 2}, half of the {rotary} rotated channels")
    return RopeConfig(
        theta=float(theta), rotary_size=rotary,
        mrope_section=(int(section[0]), int(section[1]), int(section[2])) if section is not None else None,
        mrope_interleaved=bool(rope.get("mrope_interleaved", hybrid or family.startswith("qwen3_vl"))),
    )


def _experts(text: dict[str, Any]) -> ExpertConfig | None:
    """Where Qwen3-MoE leaves `norm_topk_prob` out, its class does not normalise; Qwen3-Next's does, and Qwen3.5's always."""
    count, kind = int(text.get("num_experts") or text.get("num_local_experts") or 0), str(text.get("model_type", ""))
    if not count:
        return None
    top_k, step = int(text["num_experts_per_tok"]), int(text.get("decoder_sparse_step") or 1)
    if not 1 <= top_k <= count:
        raise CheckpointError(f"config.json: num_experts_per_tok is {top_k}; it must be 1 to {count}, the number of experts")
    dense = {int(layer) for layer in text.get("mlp_only_layers") or ()}
    return ExpertConfig(
        count=count, top_k=top_k, intermediate_size=int(text["moe_intermediate_size"]),
        shared_size=int(text.get("shared_expert_intermediate_size") or 0),
        normalise=kind.startswith("qwen3_5") or bool(text.get("norm_topk_prob", kind != "qwen3_moe")),
        layers=frozenset(i for i in range(int(text["num_hidden_layers"])) if i not in dense and (i + 1) % step == 0))


def _layers(text: dict[str, Any], heads: int, head_size: int) -> tuple[LayerSpec, ...]:
    count = int(text["num_hidden_layers"])
    kinds = text.get("layer_types")
    if kinds is None:
        interval = int(text.get("full_attention_interval") or 4) if text.get("linear_num_key_heads") else None
        kinds = ["linear_attention" if interval and (i + 1) % interval else "full_attention" for i in range(count)]
    if len(kinds) != count:
        raise CheckpointError(f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers says {count}")
    layers: list[LayerSpec] = []
    for i, kind in enumerate(kinds):
        if kind == "full_attention":
            layers.append(AttentionLayer(name=f"layers.{i}", kv_heads=int(text.get("num_key_value_heads") or heads),
                                         head_size=head_size))
        elif kind == "linear_attention":
            layers.append(LinearLayer(
                name=f"layers.{i}", key_heads=int(text["linear_num_key_heads"]),
                value_heads=int(text["linear_num_value_heads"]), key_head_size=int(text["linear_key_head_dim"]),
                value_head_size=int(text["linear_value_head_dim"]),
                conv_width=int(text["linear_conv_kernel_dim"])))
        else:
            raise CheckpointError(f"config.json: layer {i} is of type {kind!r}; known: full_attention, linear_attention")
    return tuple(layers)


def _vision(path: Path, config: dict[str, Any] | None) -> VisionConfig | None:
    if not config:
        return None
    deepstack = tuple(int(block) for block in config.get("deepstack_visual_indexes") or ())
    if list(deepstack) != sorted(set(deepstack) & set(range(int(config["depth"])))):
        raise CheckpointError(f"{path / 'config.json'}: vision_config.deepstack_visual_indexes {list(deepstack)} must ascend "
                              f"within the {config['depth']} blocks")
    windows = _windows(path, config) if config.get("window_size") else None
    activation = "gelu_pytorch_tanh" if windows is None else "silu"
    if config.get("hidden_act", activation) != activation:
        raise CheckpointError(f"{path / 'config.json'}: vision_config.hidden_act {config['hidden_act']!r} is not supported; "
                              f"known: {activation}")
    positions = int(config["num_position_embeddings"]) if windows is None else 0
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


def _image(path: Path, vision: VisionConfig | None) -> ImageConfig | None:
    if vision is None:
        return None
    processor = _json(path / "preprocessor_config.json") or _json(path / "processor_config.json").get("image_processor") or {}
    size = processor.get("size") or {}
    mean, std = processor.get("image_mean", [0.5] * 3), processor.get("image_std", [0.5] * 3)
    for key, own in (("patch_size", vision.patch_size), ("merge_size", vision.merge_size)):
        if int(processor.get(key, own)) != own:
            raise CheckpointError(f"{path}: the image processor's {key} is {processor[key]}, the vision tower's {own}")
    return ImageConfig(
        min_pixels=int(size.get("shortest_edge", processor.get("min_pixels", 65536))),
        max_pixels=int(size.get("longest_edge", processor.get("max_pixels", 16777216))),
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        mean=(float(mean[0]), float(mean[1]), float(mean[2])), std=(float(std[0]), float(std[1]), float(std[2])))


DEMO = Path(__file__).parent / "demo_model"
"""The demo checkpoint that ships inside the product."""


_HUB_ID = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(@(?P<revision>[\w.-]+))?")


def resolve(path: str, hub_cache: Path) -> Path:
    """`model.path` of the configuration as a folder.

    `demo` names the checkpoint inside the product; what is no folder may be a hub id, `owner/name` or `owner/name@revision`,
    whose files lie in the local hub cache. Nothing is downloaded. Raises CheckpointError that says what to download.
    """
    if path == "demo":
        return DEMO
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    hub_id = _HUB_ID.fullmatch(path)
    if hub_id is None:
        raise CheckpointError(f"{path} is no folder; give model.path a checkpoint folder, or a hub id such as Qwen/Qwen3-0.6B")
    repository = hub_cache / f"models--{hub_id['owner']}--{hub_id['name']}"
    revision = hub_id["revision"] or "main"
    ref = repository / "refs" / revision
    snapshot = repository / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    name = f"{hub_id['owner']}/{hub_id['name']}"
    if not snapshot.is_dir():
        raise CheckpointError(f"{path} is neither a folder nor in the hub cache at {hub_cache}; download it first: "
                              f"hf download {name} --revision {revision}")
    if not (snapshot / "config.json").exists() or not any(snapshot.glob("*.safetensors")):
        raise CheckpointError(f"the hub cache holds only a part of {path} ({snapshot} lacks config.json or *.safetensors); "
                              f"download the rest: hf download {name} --revision {revision}")
    return snapshot
