"""FP8 checkpoints compute what transformers does with the same numbers dequantised in numpy: in chunks, cut every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import checkpoint as checkpoints
from slipstream import sharding
from slipstream.layers.parallel import Communicator
from slipstream.models import registry
from slipstream.models.qwen import CausalLM
from tests.support import fp8, oracle, ranks, tiny
from tests.support.plain import Plain

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 490, 45)]
BLOCK = (24, 40)  # every TP of these models cuts inside of blocks
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK),
          "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens", "model.visual", "mlp.gate", "in_proj_a"]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
CHANNEL = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
           "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
               "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}}}}
GROUPED = {**CHANNEL, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
    "num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)}}}}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}

KINDS: dict[str, tuple[dict[str, Any], fp8.Block, str, dict[str, Any]]] = {
    "blocks": (BLOCKS, BLOCK, "_scale_inv", {}),
    "bfloat16 scales": (BLOCKS, BLOCK, "_scale_inv", {"stored": torch.bfloat16}),
    "one scale": (TENSOR, (0, 0), "_scale", {"shape": lambda scales: scales.reshape(())}),
    "a scale in a list": (TENSOR, (0, 0), "_scale", {"shape": lambda scales: scales.reshape(1), "more": {
        "model.layers.0.mlp.up_proj.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}}),
    "channels": (CHANNEL, (1, 0), "_scale", {}),
    "flat channels": (FBGEMM, (1, 0), "_scale", {"shape": lambda scales: scales.reshape(-1)}),
    "compressed blocks": (GROUPED, BLOCK, "_scale", {}),
}


def load(folder: Path, comm: Communicator | None = None) -> CausalLM:
    return registry.load(checkpoints.read(folder), dtype=torch.float32, device=torch.device("cpu"), comm=comm)


def check(folder: Path, meant: Path) -> None:
    """Every number, bit by bit; the logits of transformers; and the whole model's logits on every rank's part."""
    torch.set_num_threads(1)
    model, checkpoint = load(folder), checkpoints.read(folder)
    exact = dict(load(meant).named_parameters())
    assert all(torch.equal(each, exact[name]) for name, each in model.named_parameters())
    assert any(name.endswith("scale_inv") or name.endswith("scale") for name in load_file(folder / "model.safetensors"))
    expected = oracle.logits(meant, TOKENS)
    for chunk in (7, 64):
        plain = Plain(model=model, checkpoint=checkpoint)
        assert (plain.prefill(TOKENS[:-4], chunk=chunk) - expected[:-4]).abs().max() < 1e-4
        decoded = torch.stack([plain.decode(token) for token in TOKENS[-4:]])
        assert (decoded - expected[-4:]).abs().max() < 1e-4

    def compute(comm: Communicator) -> torch.Tensor:
        return Plain(model=load(folder, comm), checkpoint=checkpoint).prefill(TOKENS, chunk=16)

    for tp, pp, apart in ((2, 1, False), (1, 2, False), (2, 2, False), (4, 1, False), (2, 1, True)):
        geometry = sharding.plan(checkpoint, tp=tp, pp=pp, expert_parallel=apart and checkpoint.experts is not None)
        found = ranks.run(geometry, compute)[geometry.world - tp]
        assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max())), (tp, pp, apart)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scale(kind: str, tmp_path: Path) -> None:
    config, block, suffix, options = KINDS[kind]
    folder = tiny.write("qwen3", tmp_path / "whole")
    check(tmp_path / "fp8", fp8.convert(folder, tmp_path / "fp8", config, block, suffix, **options))


@pytest.mark.parametrize(("name", "kind"), [("qwen3_5_text", "blocks"), ("qwen3_moe", "blocks"), ("qwen3_next", "blocks"),
                                            ("qwen3_next", "channels"), ("qwen3_5_moe_vl", "bfloat16 scales"),
                                            ("qwen3_moe", "one scale")])
def test_every_kind_of_layer(name: str, kind: str, tmp_path: Path) -> None:
    config, block, suffix, options = KINDS[kind]
    folder = tiny.write(name, tmp_path / "whole", 1)
    check(tmp_path / "fp8", fp8.convert(folder, tmp_path / "fp8", config, block, suffix, **options))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("kind", "shape"), [("blocks", None), ("channels", None),
                                             ("one scale", lambda scales: scales.flatten())])
def test_experts_in_one_tensor(kind: str, shape: Any, transposed: bool, tmp_path: Path) -> None:
    """[experts, ...] weights and scales, which a rank reads its channels of: of the gates, and apart from them of the ups. Or
    with inputs before outputs, as Qwen3-VL-MoE has them."""
    folder = tiny.write("qwen3_moe", tmp_path / "whole", 1)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (torch.stack([tensors.pop(f"{stem}{expert}.{part}_proj.weight") for expert in range(8)])
                          for part in ("gate", "up", "down"))
        tensors |= {stem + "gate_up_proj": torch.cat((gate, up), 1), stem + "down_proj": down}
    save_file(tensors, folder / "model.safetensors")
    config, block, suffix, _ = KINDS[kind]
    meant = fp8.convert(folder, tmp_path / "fp8", config, block, suffix, **({"shape": shape} if shape else {}))
    _apart(meant)
    if transposed:
        held = load_file(tmp_path / "fp8" / "model.safetensors")
        save_file({name: tensor.transpose(-1, -2).contiguous() if "mlp.experts." in name and tensor.dim() == 3 else tensor
                   for name, tensor in held.items()}, tmp_path / "fp8" / "model.safetensors")
    check(tmp_path / "fp8", meant)


def _apart(folder: Path) -> None:
    """A matrix for each expert again, as transformers reads them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        stem, stack = name.rpartition(".")[0], tensors.pop(name)
        for expert, matrix in enumerate(stack):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if "gate_up" in name else [("down", matrix)]
            tensors |= {f"{stem}.{expert}.{part}_proj.weight": each.contiguous() for part, each in parts}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
