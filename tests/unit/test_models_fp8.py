"""FP8 on disk: the numbers themselves, what a rank reads, what is refused; and the flavour of gfx942."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import Quantization
from slipstream.checkpoint.quantization import quantization
from slipstream.errors import CheckpointError
from slipstream.kernels import fp8 as kernels
from slipstream.layers.parallel import Alone
from slipstream.models import registry, weights
from slipstream.models.qwen import CausalLM
from slipstream.sharding import Geometry, Shard
from tests.support import fp8
from tests.support.counting import Counting

CODES = torch.arange(256, dtype=torch.uint8)

# Numbers ----------------------------------------------------------------------------------------------------------------


def fnuz_value(bits: int) -> float:
    """What a byte of e4m3fnuz means: exponents are one higher, and there is no -0, in whose place NaN is."""
    if bits == 0x80:
        return float("nan")
    sign, exponent, mantissa = -1.0 if bits & 0x80 else 1.0, bits >> 3 & 0xF, bits & 7
    return sign * (mantissa / 8 * 2.0**-7 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 8))


def test_the_flavour_of_gfx942_means_the_same_for_every_code() -> None:
    finite = CODES[(CODES & 0x7F) != 0x7F]
    assert len(finite) == 254
    for scale in (1.0, 0.37, 2.0**-20):
        stored, scales = kernels.to_fnuz(finite.view(torch.float8_e4m3fn), torch.tensor(scale))
        assert stored.dtype == torch.float8_e4m3fnuz
        assert float(scales) == 2 * np.float32(scale), "a doubling is exact"
        bits = stored.view(torch.uint8).tolist()
        assert 0x80 not in bits, "NaN there"
        assert [fnuz_value(code) for code in bits] == stored.float().tolist()
        for code, there in zip(finite.tolist(), bits, strict=True):
            assert np.float32(fp8.value(code)) * np.float32(scale) == np.float32(fnuz_value(there)) * scales.numpy()
    assert max(stored.float().tolist()) == 224, "448 of e4m3fn, in the range up to 240"


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_would_be_a_number_of_gfx942_and_is_refused(code: int) -> None:
    assert abs(fnuz_value(code)) == 240
    with pytest.raises(ValueError, match="NaN"):
        kernels.to_fnuz(torch.tensor([1, code], dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(()))


def test_dequantised_is_rounded_once() -> None:
    """In bfloat16 neither the scale nor the product is rounded before the end."""
    stored = CODES[(CODES & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    found = kernels.dequantise(stored, torch.tensor(0.3712), torch.bfloat16)
    exact = torch.tensor([fp8.value(int(code)) * float(np.float32(0.3712)) for code in stored.view(torch.uint8)],
                         dtype=torch.float64)
    assert torch.equal(found, exact.float().bfloat16())


@settings(deadline=None)
@given(number=st.floats(-1000, 1000, width=32), scale=st.sampled_from([1.0, 0.25, 3.0]))
def test_quantised_is_the_nearest_and_saturates(number: float, scale: float) -> None:
    found = float(kernels.quantise(torch.tensor([number]), scale).float())
    wanted = float(np.float32(number) / np.float32(scale))
    finite = fp8.VALUES[~np.isnan(fp8.VALUES)].astype(float)
    assert abs(found - wanted) == np.abs(finite - wanted).min()
    assert abs(found) <= 448


def test_an_infinite_number_saturates_too() -> None:
    assert kernels.quantise(torch.tensor([torch.inf, -torch.inf]), 2.0).float().tolist() == [448, -448]


def test_numbers_are_clamped_before_a_cast_that_does_not_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's cast to e4m3fn does; its cast to the other flavour gives NaN, as casts elsewhere may."""
    numbers = torch.tensor([1e6, -1e6, 3.0])
    assert numbers.to(torch.float8_e4m3fnuz).float().isnan().tolist() == [True, True, False]
    monkeypatch.setattr(kernels, "E4M3", torch.float8_e4m3fnuz)
    monkeypatch.setattr(kernels, "LARGEST", 240.0)
    assert kernels.quantise(numbers, 1.0).float().tolist() == [240, -240, 3]


# What a rank reads ------------------------------------------------------------------------------------------------------

HIDDEN, VOCAB, HEADS, HEAD = 200, 40, 8, 20
Q, DOWN, UP = (f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj"))
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def write(folder: Path, wide: int = 640, change: dict[str, Tensor | None] | None = None, quantized: Any = BLOCKS) -> Path:
    """One layer in blocks of 128; `model-meant` beside the folder holds what it means."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens": (VOCAB, HIDDEN), "norm": (HIDDEN,), "layers.0.input_layernorm": (HIDDEN,),
              "layers.0.post_attention_layernorm": (HIDDEN,), "layers.0.self_attn.q_norm": (HEAD,),
              "layers.0.self_attn.k_norm": (HEAD,), "layers.0.self_attn.o_proj": (HIDDEN, HEADS * HEAD),
              "layers.0.mlp.gate_proj": (wide, HIDDEN), "layers.0.mlp.up_proj": (wide, HIDDEN),
              "layers.0.mlp.down_proj": (HIDDEN, wide),
              **{f"layers.0.self_attn.{name}_proj": (HEADS * HEAD, HIDDEN) for name in "qkv"}}
    plain = folder / "plain"
    plain.mkdir()
    save_file({f"model.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()},
              plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "head_dim": HEAD, "intermediate_size": wide, "num_hidden_layers": 1,
        "tie_word_embeddings": True}))
    fp8.convert(plain, folder / "model", quantized, (128, 128), "_scale_inv")
    tensors = load_file(folder / "model" / "model.safetensors")
    save_file({name: tensor for name, tensor in (tensors | (change or {})).items() if tensor is not None},
              folder / "model" / "model.safetensors")
    return folder / "model"


def load(folder: Path, tp: int = 1, rank: int = 0, dtype: torch.dtype = torch.float32) -> CausalLM:
    comm = Alone(1)
    comm.shard = Shard(geometry=Geometry(tp=tp, stages=(1,)), rank=rank)
    return registry.load(checkpoints.read(folder), dtype=dtype, device=torch.device("cpu"), comm=comm)


@pytest.mark.parametrize(("wide", "tp"), [(512, 8), (768, 4), (640, 8), (640, 1)])
def test_a_rank_reads_its_rows_and_the_scales_that_they_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: int,
                                                              tp: int) -> None:
    """Shards of 64, 192 and 80 channels begin and end inside of blocks of 128 (LD-07)."""
    folder = write(tmp_path, wide)
    meant = load_file(tmp_path / "model-meant" / "model.safetensors")
    own, sides = wide // tp, range(0, wide, 128)
    for rank in range(tp):
        read: dict[str, int] = {}
        monkeypatch.setattr(weights, "safe_open", lambda path, framework, read=read: Counting(path, framework, read))
        found = dict(load(folder, tp, rank).named_parameters())
        part = slice(rank * own, (rank + 1) * own)
        assert torch.equal(found[UP], meant[UP][part])
        assert torch.equal(found[DOWN], meant[DOWN][:, part])
        touched = len([side for side in sides if side < part.stop and side + 128 > part.start])
        assert read[UP] == read[DOWN] == own * HIDDEN, "one byte a number"
        assert read[UP + "_scale_inv"] == read[DOWN + "_scale_inv"] == touched * 2 * 4
    whole = dict(load(folder, dtype=torch.bfloat16).named_parameters())
    assert torch.equal(whole[UP], meant[UP].bfloat16()), "rounded once"


def test_a_scale_may_lie_in_another_file(tmp_path: Path) -> None:
    folder = write(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: "scales.safetensors" if "scale" in name else "weights.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    meant = load_file(tmp_path / "model-meant" / "model.safetensors")
    assert all(torch.equal(each, meant[name]) for name, each in load(folder).named_parameters())


def test_a_module_that_was_left_as_it_is_is_seen_from_its_weight(tmp_path: Path) -> None:
    """Neither named in the list nor quantised; an MTP layer's like that are published (LD-03)."""
    plain = torch.randn(HEADS * HEAD, HIDDEN)
    folder = write(tmp_path, change={Q: plain, Q + "_scale_inv": None, "mtp.fc.weight": torch.ones(2, 2)})
    assert torch.equal(load(folder).get_parameter(Q), plain)


def test_a_tied_head_is_left_out_with_its_scale(tmp_path: Path) -> None:
    folder = write(tmp_path, change={"lm_head.weight": torch.ones(VOCAB, HIDDEN).to(torch.float8_e4m3fn),
                                     "lm_head.weight_scale_inv": torch.ones(1, 2)})
    assert load(folder).lm_head is None


# What is refused --------------------------------------------------------------------------------------------------------

SCALE = Q + "_scale_inv"
GOOD = torch.ones(2, 2)
FP8 = torch.ones(HEADS * HEAD, HIDDEN).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("change", "words"), [
    ({SCALE: None}, r"q_proj\.weight in .* as torch\.float8_e4m3fn, but its scale, .*q_proj\.weight_scale_inv, is missing"),
    ({SCALE: torch.ones(2, 1)}, r"q_proj\.weight_scale_inv in .*expected shape \(2, 2\), .* \(160, 200\), found \(2, 1\)"),
    ({SCALE: torch.ones(())}, r"q_proj\.weight_scale_inv in .*expected shape \(2, 2\).* found \(\)"),
    ({SCALE: GOOD * torch.nan}, r"q_proj\.weight_scale_inv in .* negative, NaN or infinity"),
    ({SCALE: -GOOD}, r"q_proj\.weight_scale_inv in .* negative, NaN or infinity"),
    ({SCALE: GOOD.to(torch.int32)}, r"q_proj\.weight_scale_inv in .* stored as torch\.int32; known"),
    ({Q: torch.randn(HEADS * HEAD, HIDDEN)}, r"q_proj\.weight in .* stored as torch\.float32, but has a scale, .*_scale_inv"),
    ({Q: FP8.to(torch.float8_e5m2)}, r"q_proj\.weight in .* stored as torch\.float8_e5m2, but has a scale"),
    ({Q + "_scale": torch.ones(1)}, r"are scales of the same weight"),
    ({Q: torch.full_like(FP8.view(torch.uint8), 0x7F).view(FP8.dtype)}, r"q_proj\.weight in .* holds NaN"),
    ({Q: FP8[:, 1:].contiguous()}, r"q_proj\.weight in .*expected shape \(160, 200\), found \(160, 199\)"),
    ({Q: None}, r"lacks 1 weights: .*q_proj\.weight \(160, 200\); .* not known, such as .*q_proj\.weight_scale_inv"),
    ({"model.layers.0.mlp.extra.weight_scale_inv": GOOD}, r"does not have: .*mlp\.extra\.weight_scale_inv"),
    ({"model.norm.weight": torch.ones(HIDDEN).to(torch.float8_e4m3fn), "model.norm.weight_scale_inv": torch.ones(2)},
     r"norm\.weight_scale_inv in .*expected shape of no scale"),
])
def test_a_bad_weight_or_scale_stops_loading_by_name(tmp_path: Path, change: dict[str, Tensor | None], words: str) -> None:
    folder = write(tmp_path, change=change)
    with pytest.raises(CheckpointError, match=words):
        load(folder)


def test_fp8_that_config_json_does_not_speak_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is stored as torch\.float8_e4m3fn; known: .* with a quantization_config"):
        load(write(tmp_path, quantized=None))


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize(("ignored", "module", "expected"), [
    ("model.language_model.layers.1.mlp.gate", "layers.1.mlp.gate", True),
    ("model.layers.1.mlp.gate", "layers.1.mlp.gate", True), ("layers.1.mlp", "layers.1.mlp.gate", True),
    ("language_model.model.layers.1.mlp.gate", "layers.1.mlp.gate", True), ("mlp.gate", "layers.1.mlp.gate", True),
    ("mlp.gate", "layers.1.mlp.gate_proj", False), ("model.layers.1", "layers.11.mlp.gate", False),
    ("model", "layers.1", False),
    ("lm_head", "lm_head", True), ("model.visual", "visual.blocks.0.attn.qkv", True), ("visual", "visual.merger.fc1", True),
    ("re:.*mlp.gate$", "layers.1.mlp.gate", True), ("re:.*mlp.gate$", "layers.1.mlp.gate_proj", False),
    ("re:model.layers.1.mlp.*", "layers.1.mlp.gate", True), ("re:visual.*", "visual.merger.fc1", True)])
def test_ignored_modules_under_every_prefix(prefix: str, ignored: str, module: str, expected: bool) -> None:
    assert Quantization(blocks=(), suffix="", ignored=("other", ignored)).ignores(prefix + module) == expected


@pytest.mark.parametrize("name", [Q.removesuffix(".weight"), "q_proj", "re:.*self_attn.*", "model.language_model.layers.0"])
def test_a_module_that_is_ignored_must_not_be_fp8(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, quantized={**BLOCKS, "modules_to_not_convert": [name]})
    with pytest.raises(CheckpointError, match=r"_proj\.weight in .* stored as torch\.float8_e4m3fn, but quantization_config"):
        load(folder)


GROUP = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def compressed(**changed: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {**GROUP, **changed}}}}


@pytest.mark.parametrize(("said", "words"), [
    ({"quant_method": "awq", "bits": 4}, r"quant_method 'awq' is not supported; known: fp8 .*, fbgemm_fp8, compressed-tensors"),
    ({"bits": 4}, "quant_method None is not supported; known: fp8"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"a block is \[128\]; it must be two positive numbers"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "it must be two positive numbers"),
    ({**BLOCKS, "ignore": ["re:(mlp"]}, r"'\(mlp' is no expression"),
    (compressed(type="int"), r"\{'type': 'int'\} is not supported; known"), (compressed(num_bits=4), "'num_bits': 4"),
    (compressed(symmetric=False), "'symmetric': False"), (compressed(strategy="group"), "strategy 'group' is not supported"),
    (compressed(strategy="block"), "a block is None"),
    ({**compressed(), "transform_config": {"config_groups": {"r": 1}}}, "transform_config"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}, "quantises no weights"),
])
def test_what_is_not_known_is_refused_at_start(said: dict[str, Any], words: str) -> None:
    for config, text in (({"quantization_config": said}, {}), ({}, {"quantization_config": said})):
        with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config: .*{words}"):
            quantization(config, text, Path("config.json"))
