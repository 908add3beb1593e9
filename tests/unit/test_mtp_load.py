"""The layer that drafts on disk: under which names, in which layouts, FP8 or not; what is refused, and by which words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream import config, sharding
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import registry, weights
from slipstream.models.qwen import CausalLM
from slipstream.types import DraftLayer
from tests.support import fp8, mtp, tiny
from tests.support.small import hybrid_checkpoint, random_model, sparse_checkpoint

QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40], "modules_to_not_convert": ["lm_head"]}


def load(folder: Path, drafts: bool = True) -> CausalLM:
    return registry.load(checkpoints.read(folder, drafts=drafts), dtype=torch.float32, device=torch.device("cpu"))


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> Path:
    found = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Qwen3.5 with experts in one tensor a layer, and those of the layer that drafts a matrix each."""
    return mtp.add(tiny.write("qwen3_5_moe_text", tmp_path / "model"))


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "model.language_model.mtp."])
def test_its_names_on_disk(tmp_path: Path, prefix: str) -> None:
    here = mtp.add(tiny.write("qwen3_5_moe_text", tmp_path / "model"), prefix=prefix)
    stored = load_file(here / "model.safetensors")
    model = load(here)
    assert torch.equal(model.get_parameter("mtp.fc.weight"), stored[prefix + "fc.weight"])
    experts = model.get_parameter("mtp.layers.0.mlp.experts.down_proj")
    assert torch.equal(experts[3], stored[prefix + "layers.0.mlp.experts.3.down_proj.weight"])
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(model.named_parameters())


def test_without_drafts_it_is_left_out_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LD-02."""
    with caplog.at_level("INFO", logger="slipstream.models.weights"):
        assert load(folder, drafts=False).mtp is None
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "41 weights are not used by this model, such as mtp.fc.weight"]


def test_what_is_missing_or_too_much_is_named(folder: Path) -> None:
    """LD-02: after fine-tuning all may be gone, or a part."""
    whole = load_file(folder / "model.safetensors")
    rewrite(folder, {"mtp.layers.1.input_layernorm.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"does not have: mtp\.layers\.1\.input_layernorm\.weight"):
        load(folder)
    rewrite(folder, {"mtp.layers.1.input_layernorm.weight": None, "mtp.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights: mtp\.norm\.weight \(64,\)"):
        load(folder)
    rewrite(folder, {name: None for name in whole if name.startswith("mtp.")})
    with pytest.raises(CheckpointError, match=r"has no mtp\.\* weights, .* set speculative\.tokens to 0"):
        load(folder)


@pytest.mark.parametrize("quantised", [True, False])
def test_in_an_fp8_checkpoint(folder: Path, quantised: bool) -> None:
    """LD-03: what is stored decides, for the layer that drafts as for any other."""
    meant = fp8.convert(folder, folder.with_name("fp8"), QUANTIZATION, (24, 40), "_scale_inv")
    if not quantised:
        plain = load_file(folder / "model.safetensors")
        change: dict[str, Tensor | None] = {name: tensor for name, tensor in plain.items() if name.startswith("mtp.")}
        scales = [name + "_scale_inv" for name in change]
        rewrite(folder.with_name("fp8"), change | dict.fromkeys(scales))
        rewrite(meant, change)
    ours, right = load(folder.with_name("fp8")), dict(load(meant).named_parameters())
    kinds = {name: tensor.dtype for name, tensor in load_file(folder.with_name("fp8") / "model.safetensors").items()}
    assert (kinds["mtp.layers.0.self_attn.q_proj.weight"] == torch.float8_e4m3fn) is quantised
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, right[name], rtol=0, atol=0, msg=name)


def test_scales_of_its_fp8_kv(folder: Path) -> None:
    stem = "layers.0.self_attn."
    rewrite(folder, {f"mtp.{stem}k_scale": torch.tensor(0.5), "model.layers.3.self_attn.v_scale": torch.tensor(2.0)})
    checkpoint = checkpoints.read(folder, drafts=True)
    scales = weights.kv_scales(checkpoint)
    assert scales == ((1.0, 1.0),) * 3 + ((1.0, 2.0), (0.5, 1.0))
    model = load(folder)
    model.scale_kv(scales)
    assert model.mtp is not None
    assert model.mtp.layer.self_attn.kv_scales == (0.5, 1.0)


def test_families_without_it_are_named(tmp_path: Path) -> None:
    here = tmp_path / "model"
    here.mkdir()
    (here / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "vocab_size": 40, "num_attention_heads": 4,
        "intermediate_size": 48, "num_hidden_layers": 1}))
    assert checkpoints.read(here).draft is None
    with pytest.raises(ConfigError, match=r"speculative\.tokens: Qwen3ForCausalLM has no multi-token prediction; set it to 0"):
        checkpoints.read(here, drafts=True)


@pytest.mark.parametrize("tokens", [-1, 4])
def test_the_range_of_the_configuration(tokens: int) -> None:
    assert config.load(None).speculative.tokens == 0
    with pytest.raises(ConfigError, match=rf"speculative\.tokens must be 0 to 3, not {tokens}"):
        config.load(None, [f"speculative.tokens={tokens}"])


def test_it_belongs_to_the_last_stage() -> None:
    """`stages` counts the layers that a token passes; the one that drafts is one more of the last."""
    checkpoint = hybrid_checkpoint().drafting()
    assert isinstance(checkpoint.layers[-1], DraftLayer)
    assert (checkpoint.depth, len(checkpoint.layers)) == (2, 3)
    for stages in ((), (1, 1)):
        geometry = sharding.plan(checkpoint, tp=2, pp=2, stages=stages)
        assert geometry.stages == (1, 2)
        assert geometry.stage_of(2) == 1
    with pytest.raises(ConfigError, match="pp must be 1 to 2"):
        sharding.plan(checkpoint, tp=1, pp=3)


def test_its_mlp_is_the_first_layers() -> None:
    dense_first = sparse_checkpoint().drafting()
    assert dense_first.experts_of(dense_first.depth) is None
    experts = sparse_checkpoint().experts
    assert experts is not None
    sparse = dataclasses.replace(sparse_checkpoint(), experts=dataclasses.replace(experts, layers=frozenset({0, 1})))
    assert sparse.drafting().experts_of(2) is not None
    assert random_model(sparse.drafting()).mtp is not None


def test_a_class_that_builds_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry proves `drafts` on the model that it has built."""
    here = mtp.add(tiny.write("qwen3_5_text", tmp_path / "model"))
    inner = CausalLM.__init__

    def init(self: CausalLM, *given: object) -> None:
        inner(self, *given)  # type: ignore[arg-type]
        self.mtp = None

    monkeypatch.setattr(CausalLM, "__init__", init)
    with pytest.raises(CheckpointError, match=r"multi-token prediction .*Qwen3_5ForCausalLM declares drafts, but does not"):
        load(here)
