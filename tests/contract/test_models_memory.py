"""What loading a rank's part takes at its peak, files that are mapped included: little more than the part itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SPARE = 1.2
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 16384, "hidden_size": 1024,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 768, "intermediate_size": 1, "torch_dtype": "bfloat16"}
CHILD = """
import sys
from pathlib import Path
import torch
from slipstream import checkpoint as checkpoints, sharding
from slipstream.layers.parallel import Alone
from slipstream.models import registry

def memory(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

checkpoint = checkpoints.read(Path(sys.argv[1]))
comm = Alone(len(checkpoint.layers))
comm.shard = sharding.Shard(geometry=sharding.plan(checkpoint, tp=int(sys.argv[2]), pp=1), rank=int(sys.argv[2]) - 1)
torch.ones(1).bfloat16().aminmax()
before = memory("VmRSS")
model = registry.load(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"), comm=comm)
print(sum(each.nbytes for each in model.parameters()), memory("VmHWM") - before)
"""


def shapes(layout: str) -> dict[str, list[int]]:
    vocab, hidden, experts, wide = (CONFIG[key] for key in ("vocab_size", "hidden_size", "num_experts",
                                                            "moe_intermediate_size"))
    found = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}
    for layer in range(CONFIG["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        found |= {f"{stem}self_attn.{name}_proj.weight": [size, hidden] for name, size in
                  (("q", 1024), ("k", 512), ("v", 512), ("o", 1024))}
        found |= {f"{stem}self_attn.{name}_norm.weight": [64] for name in "qk"}
        found |= {f"{stem}{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
        found[f"{stem}mlp.gate.weight"] = [experts, hidden]
        if layout == "transposed":
            found |= {f"{stem}mlp.experts.gate_up_proj": [experts, hidden, 2 * wide],
                      f"{stem}mlp.experts.down_proj": [experts, wide, hidden]}
            continue
        for expert in range(experts):
            found |= {f"{stem}mlp.experts.{expert}.{name}_proj.weight": [wide, hidden] for name in ("gate", "up")}
            found[f"{stem}mlp.experts.{expert}.down_proj.weight"] = [hidden, wide]
    return found


def write_zeros(file: Path, shapes: dict[str, list[int]], dtype: str, size: int) -> None:
    """A safetensors file that takes no room on disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, count = end, size
        for side in shape:
            count *= side
        end = start + count
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("layout", "dtype", "size", "tp"), [("transposed", "BF16", 2, 1), ("in pieces", "F32", 4, 2)])
def test_loading_takes_little_more_than_the_shard(tmp_path: Path, layout: str, dtype: str, size: int, tp: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_zeros(tmp_path / "model.safetensors", shapes(layout), dtype, size)
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), str(tp)], capture_output=True, text=True, check=False,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    shard, peak = map(int, done.stdout.split())
    assert shard > 350 << 20
    assert shard <= peak <= SPARE * shard, f"{peak / shard:.2f} times the shard"
