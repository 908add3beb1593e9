"""What a model class can do against what a checkpoint declares; names on disk; the kernel table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels import dispatch
from slipstream.models import decoder, qwen, registry, vision
from slipstream.models.qwen import CausalLM
from tests.support.small import hybrid_checkpoint, random_model

CPU = torch.device("cpu")


def write(folder: Path, weights: dict[str, Tensor], **config: object) -> Path:
    """A text-only Qwen3.5 folder, whose configuration is that of `hybrid_checkpoint`."""
    declared = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 40, "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                            "mrope_section": [2, 2, 2]}}
    (folder / "config.json").write_text(json.dumps({**declared, **config}))
    save_file(weights, folder / "model.safetensors")
    return folder


def load(folder: Path) -> CausalLM:
    return registry.load(checkpoints.read(folder), dtype=torch.float32, device=CPU)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return {name: value.detach() for name, value in random_model(hybrid_checkpoint()).named_parameters()}


@pytest.mark.parametrize("rename", [
    lambda name: name,
    lambda name: name.replace("model.", "model.language_model."),
    lambda name: "language_model." + name,
])
def test_the_same_weights_under_every_prefix(tmp_path: Path, weights: dict[str, Tensor], rename: Callable[[str], str]) -> None:
    """`model.`, `model.language_model.`, `language_model.model.` (LD-01)."""
    found = dict(load(write(tmp_path, {rename(name): value for name, value in weights.items()})).named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_an_unknown_prefix_fails_with_examples(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match=r"lacks \d+ weights: .*such as transformer\."):
        load(write(tmp_path, {name.replace("model.", "transformer."): value for name, value in weights.items()}))


def test_unused_heads_and_towers_are_skipped_with_one_line(tmp_path: Path, weights: dict[str, Tensor],
                                                           caplog: pytest.LogCaptureFixture) -> None:
    """`mtp.*` and an unwanted tower, beside a text-only class (LD-02)."""
    extra = {name: torch.zeros(2) for name in ("mtp.fc.weight", "mtp.norm.weight", "model.visual.merger.norm.weight")}
    with caplog.at_level("INFO", logger="slipstream.models.weights"):
        load(write(tmp_path, weights | extra))
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "3 weights are not used by this model, such as model.visual.merger.norm.weight"]


def test_a_text_only_class_over_a_tower_takes_no_pictures(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    vision = json.loads((checkpoints.DEMO / "config.json").read_text())["vision_config"]
    folder = write(tmp_path, weights, vision_config=vision, image_token_id=7)
    assert checkpoints.read(folder).vision is None
    assert checkpoints.read(folder).image_token_id is None
    assert not isinstance(load(folder), registry.VisionModel)


def test_a_class_that_lacks_what_the_checkpoint_declares_is_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write(tmp_path, weights, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(CheckpointError, match=r"Qwen3ForCausalLM does not do: linear-attention layers; M-RoPE"):
        load(tmp_path)


def test_pictures_want_mrope(tmp_path: Path) -> None:
    demo = checkpoints.read(checkpoints.DEMO)
    flat = dataclasses.replace(demo, rope=dataclasses.replace(demo.rope, mrope_section=None))
    with pytest.raises(CheckpointError, match=r"pictures without M-RoPE"):
        registry.load(flat, dtype=torch.float32, device=CPU)
    assert demo.vision is not None
    deep = dataclasses.replace(demo, vision=dataclasses.replace(demo.vision, deepstack=(0,)))
    with pytest.raises(CheckpointError, match=r"Qwen3_5ForConditionalGeneration does not do: deepstack features"):
        registry.load(deep, dtype=torch.float32, device=CPU)
    windows = checkpoints.WindowConfig(side=2, full_blocks=frozenset())
    windowed = dataclasses.replace(demo, vision=dataclasses.replace(demo.vision, windows=windows))
    with pytest.raises(CheckpointError, match=r"does not do: windowed vision"):
        registry.load(windowed, dtype=torch.float32, device=CPU)
    plain = dataclasses.replace(demo, architecture="Qwen2_5_VLForConditionalGeneration")
    with pytest.raises(CheckpointError, match=r"does not do: vision without windows"):
        registry.load(plain, dtype=torch.float32, device=CPU)
    blind = dataclasses.replace(demo, architecture="Qwen3_5ForCausalLM")
    with pytest.raises(CheckpointError, match=r"a vision tower"):
        registry.load(blind, dtype=torch.float32, device=CPU)


class Plain(qwen.Qwen3ForCausalLM):
    """What a file in models/ might hold."""


def declares(*flags: str, base: type[CausalLM] = Plain, **more: object) -> type[CausalLM]:
    return type("Liar", (base,), {**dict.fromkeys(flags, True), **more})


@pytest.mark.parametrize(("kind", "words"), [
    (declares("takes_pictures"), "Liar declares takes_pictures but has no method encode_images"),
    (declares("drafts"), "Liar declares drafts but has no method draft"),
    (declares(encode_images=lambda self, pixels: []), "Liar has the method encode_images but does not declare takes_pict"),
    (declares(draft=lambda self: None), "Liar has the method draft but does not declare drafts"),
    (declares("takes_mrope", base=qwen.Qwen3_5ForCausalLM), "takes_mrope twice: in Liar and in Qwen3_5ForCausalLM"),
    (declares("takes_pictures", base=qwen.Qwen3VLForConditionalGeneration),
     "Liar declares takes_pictures twice: in Liar and in ConditionalGeneration"),
    (declares("takes_linear_layers", base=declares("takes_linear_layers")), "takes_linear_layers twice: in Liar and in Liar"),
])
def test_a_class_that_only_declares_or_declares_twice_is_refused(kind: type[CausalLM], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        registry.by_name(Plain, kind)
    assert registry.by_name(Plain) == {"Plain": Plain}


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two model classes have one name: Liar, Liar"):
        registry.by_name(declares(), declares())


class _Nothing(torch.nn.Module):
    """In the place of a part."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


@pytest.mark.parametrize(("part", "flag"), [
    ("GatedDeltaNet", "takes_linear_layers"), ("SparseMLP", "takes_experts"), ("Rotary", "takes_mrope"),
    ("VisionTower", "takes_deepstack"), ("WindowedTower", "takes_windows")])
def test_a_class_without_the_parts_that_it_declares_is_refused(part: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weight is read, for a checkpoint that needs them."""
    demo = checkpoints.read(checkpoints.DEMO)
    assert demo.vision is not None
    change: dict[str, Any] = {
        "SparseMLP": {"architecture": "Qwen3_5MoeForConditionalGeneration", "experts": checkpoints.ExpertConfig(
            count=4, top_k=2, intermediate_size=16, shared_size=0, normalise=True, layers=frozenset({1, 2}))},
        "VisionTower": {"architecture": "Qwen3VLForConditionalGeneration", "layers": demo.layers[3:4],
                        "vision": dataclasses.replace(demo.vision, deepstack=(0,))},
        "WindowedTower": {"architecture": "Qwen2_5_VLForConditionalGeneration", "layers": demo.layers[3:4],
                          "vision": dataclasses.replace(demo.vision, windows=checkpoints.WindowConfig(
                              side=2, full_blocks=frozenset()))}}.get(part, {})
    checkpoint = dataclasses.replace(demo, path=Path("nowhere"), **change)
    with pytest.raises(CheckpointError, match="nowhere"):  # all is proved, and the first weight is missing
        registry.load(checkpoint, dtype=torch.float32, device=CPU)
    for module in (decoder, qwen, vision):
        monkeypatch.setattr(module, part, _Nothing, raising=False)
    if part.endswith("Tower"):
        monkeypatch.setattr(registry.architectures()[checkpoint.architecture], "tower", _Nothing, raising=False)
    with pytest.raises(CheckpointError, match=rf"declares {flag}, but does not implement it"):
        registry.load(checkpoint, dtype=torch.float32, device=CPU)


def test_every_architecture_declares_once_and_implements() -> None:
    known = registry.architectures()
    assert len(known) > 9
    for name, kind in known.items():
        assert issubclass(kind, registry.VisionModel) == name.endswith("ForConditionalGeneration") == kind.takes_pictures


def test_a_weight_in_two_shards_is_named(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write(tmp_path, weights)
    both = "model.norm.weight"
    save_file({both: weights[both]}, tmp_path / "b.safetensors")
    index = {"weight_map": {**dict.fromkeys(weights, "model.safetensors"), both: "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"norm\.weight is in .*model\.safetensors and, by the index, in .*b\.safe"):
        load(tmp_path)


@pytest.mark.parametrize(("index", "words"), [
    ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a is listed twice"),
    ('{"weight_map": {"a": "../x.safetensors"}}', "shards lie beside their index"),
    ('{"weight_map": 3}', "is not a safetensors index"),
    ("[]", "is not a safetensors index"),
    ("{", "is not a safetensors index"),
])
def test_a_broken_index_is_named(tmp_path: Path, weights: dict[str, Tensor], index: str, words: str) -> None:
    write(tmp_path, weights)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_a_weight_too_large_for_the_dtype_stops_loading(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = torch.full((32,), 1e6)
    checkpoint = checkpoints.read(write(tmp_path, weights))
    with pytest.raises(CheckpointError, match=r"holds NaN or infinity as torch\.float16"):
        registry.load(checkpoint, dtype=torch.float16, device=CPU)


def test_eight_bit_weights_are_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(32).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* is stored as torch\.float8_e4m3fn"):
        load(write(tmp_path, weights))


def test_progress_counts_to_the_end(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    seen: list[tuple[int, int]] = []
    registry.load(checkpoints.read(write(tmp_path, weights)), dtype=torch.float32, device=CPU,
                  progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(weights)) for i in range(len(weights))]


def test_an_unknown_backend_or_dtype_names_the_known_ones() -> None:
    assert dispatch.choose("reference").name == "reference"
    with pytest.raises(ConfigError, match=r"unknown kernel backend 'magic'; known: reference"):
        dispatch.choose("magic")
    with pytest.raises(ConfigError, match=r"unknown dtype 'int8'; known: float32"):
        registry.dtype_of("int8")


def test_weights_written_by_the_model_itself_come_back(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write(tmp_path, weights)
    assert load_file(tmp_path / "model.safetensors").keys() == dict(load(tmp_path).named_parameters()).keys()
