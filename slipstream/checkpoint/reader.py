"""Reads a checkpoint folder's configuration files into a Checkpoint, or refuses what would compute something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.checkpoint import defaults
from slipstream.checkpoint import text as texts
from slipstream.checkpoint import vision as visions
from slipstream.checkpoint.folder import read_json
from slipstream.checkpoint.quantization import quantization
from slipstream.checkpoint.spec import Checkpoint
from slipstream.errors import CheckpointError
from slipstream.types import SamplingParams


def read(path: Path, *, drafts: bool = False) -> Checkpoint:
    """Parse a checkpoint folder; `drafts`: with the layer that drafts tokens. Raises CheckpointError naming the file and key
    that is missing or wrong, and ConfigError for a model that drafts none."""
    config = read_json(path / "config.json", required=True)
    try:
        found = _parse(path, config)
        return found.drafting() if drafts else found
    except KeyError as error:
        raise CheckpointError(f"{path / 'config.json'}: `{error.args[0]}` is missing") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path / 'config.json'} holds a value of the wrong kind: {error}") from error


def _parse(path: Path, config: dict[str, Any]) -> Checkpoint:
    architecture = (config.get("architectures") or [""])[0]
    if not architecture:
        raise CheckpointError(f"{path / 'config.json'}: `architectures` is missing")

    told = config.get("text_config") or config
    _refuse_unsupported(path, config, told)
    text = defaults.text(architecture, told)

    def need(section: dict[str, Any], key: str) -> Any:
        if section.get(key) is None:
            raise CheckpointError(f"{path / 'config.json'}: `{key}` is missing")
        return section[key]

    heads = int(need(text, "num_attention_heads"))
    hidden = int(need(text, "hidden_size"))
    head_size = int(text.get("head_dim") or hidden // heads)
    # A text-only class may be named over a config that also describes a tower: it is then served without pictures.
    vision = None if architecture.endswith("ForCausalLM") else visions.vision(path, config.get("vision_config"), architecture)
    generation = read_json(path / "generation_config.json")
    eos = generation.get("eos_token_id", told.get("eos_token_id", config.get("eos_token_id", text.get("eos_token_id"))))
    eos_ids = frozenset(int(i) for i in (eos if isinstance(eos, list) else [eos]) if i is not None)
    layers = texts.layers(text, heads, head_size)
    if vision is not None and len(vision.deepstack) > len(layers):
        raise CheckpointError(f"{path / 'config.json'}: vision_config.deepstack_visual_indexes names {len(vision.deepstack)} "
                              f"blocks, one for each of the first layers, but there are {len(layers)} layers")
    image = visions.image(path, vision, architecture)
    experts, rope = texts.experts(text), texts.rope(text, head_size, path)
    dense = experts is None or len(experts.layers) < int(need(text, "num_hidden_layers"))
    marks = {**defaults.marks(architecture), **config} if vision is not None else {}
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
        rope=rope,
        layers=layers,
        tie_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        attention_bias=bool(text.get("attention_bias", False)),
        max_context=texts.max_context(text, rope.scaling),
        eos_token_ids=eos_ids,
        sampling=_sampling(path / "generation_config.json", generation),
        vision=vision,
        image=image,
        image_token_id=marks.get("image_token_id"),
        video_token_id=marks.get("video_token_id"),
        vision_start_token_id=marks.get("vision_start_token_id"),
        vision_end_token_id=marks.get("vision_end_token_id"),
        video=visions.video(path, {**config, **marks}, vision, image, architecture),
        quantization=quantization(config, text, path / "config.json"),
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
    if text.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{file}: hidden_act {text['hidden_act']!r} is not supported; known: silu")
    if text.get("attn_output_gate") is False and text.get("linear_num_key_heads"):
        raise CheckpointError(f"{file}: attn_output_gate false is not supported; Qwen3.5 gates its attention")
    if text.get("output_gate_type", "swish") not in ("swish", "silu"):
        raise CheckpointError(f"{file}: output_gate_type {text['output_gate_type']!r} is not supported; known: swish")
    if text.get("use_sliding_window"):
        raise CheckpointError(f"{file}: use_sliding_window is not supported; every layer attends to the whole context")
