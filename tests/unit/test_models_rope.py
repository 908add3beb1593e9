"""Rotary tables against transformers: every kind of scaling, one axis and three, far beyond 32k positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError
from slipstream.kernels import reference
from slipstream.layers.rope import Rotary, frequencies
from slipstream.models import registry
from slipstream.positions import mrope_positions
from slipstream.types import Grid
from tests.support import oracle, tiny
from tests.support.plain import Plain

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, betas": {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 16384, "beta_fast": 16,
                    "beta_slow": 2},
    "yarn, attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 0.7},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
                     "mscale_all_dim": 0.707},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "truncate": False},
    "yarn, tiny original": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
}
HEAD = 64
SPREAD = torch.tensor([0, 1, 2, 777, 32_767, 32_768, 40_000, 131_071, 262_143])


def read(folder: Path, rope: dict[str, Any], *, old: bool = False, **text: Any) -> Checkpoint:
    """A Qwen3 folder; `old`: in the spelling of rope_theta and rope_scaling."""
    spelled = ({"rope_theta": 1e6, "rope_scaling": {**rope, "type": rope["rope_type"]}} if old
               else {"rope_parameters": {"rope_theta": 1e6, **rope}})
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 40, "hidden_size": 128,
        "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": HEAD,
        "max_position_embeddings": 40960, **spelled, **text}))
    return checkpoints.read(folder)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_frequencies_and_attention_equal_transformers(name: str, old: bool, tmp_path: Path) -> None:
    rope = KINDS[name]
    found = read(tmp_path, rope, old=old).rope
    config = transformers.Qwen3Config(hidden_size=128, num_attention_heads=2, head_dim=HEAD, max_position_embeddings=40960,
                                      rope_parameters={"rope_theta": 1e6, **rope})
    theirs = Qwen3RotaryEmbedding(config)
    if name != "default":
        wanted, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        assert torch.equal(wanted, theirs.inv_freq)
        assert scale == theirs.attention_scaling
    torch.testing.assert_close(frequencies(found), theirs.inv_freq, rtol=1e-6, atol=0)
    assert Rotary(found).attention == pytest.approx(theirs.attention_scaling, rel=1e-12)
    if name not in ("default", "dynamic"):
        assert not torch.equal(frequencies(found), frequencies(read(tmp_path, KINDS["default"]).rope))
    spread = SPREAD[SPREAD < 40960] if name == "dynamic" else SPREAD  # beyond it changes, and nothing is served
    x = torch.randn(1, 2, len(spread), HEAD, generator=torch.Generator().manual_seed(1))
    q, _ = apply_rotary_pos_emb(x, x, *theirs(x, spread[None]))
    ours = reference.rotary(x[0].transpose(0, 1), *Rotary(found)(spread[:, None].expand(-1, 3), torch.float32))
    torch.testing.assert_close(ours, q[0].transpose(0, 1), atol=2e-2, rtol=0)  # at 262,143 a float32 angle is 0.016 apart


@pytest.mark.parametrize("name", ["default", "yarn", "yarn, mscale"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_scaling_and_three_axes_together(name: str, interleaved: bool) -> None:
    """The frequency's index picks the axis, whatever the frequency is."""
    section = [12, 10, 10] if interleaved else [8, 12, 12]
    rope = {"rope_theta": 1e6, "mrope_section": section, **KINDS[name]}
    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 40960}
    config: Any = (transformers.Qwen3VLTextConfig(**sizes, head_dim=HEAD, rope_parameters={**rope, "mrope_interleaved": True})
              if interleaved else transformers.Qwen2_5_VLTextConfig(**sizes, rope_parameters=rope))
    theirs: Any = (Qwen3VLTextRotaryEmbedding if interleaved else Qwen2_5_VLRotaryEmbedding)(config)
    positions = torch.randint(0, 60_000, (3, 7), generator=torch.Generator().manual_seed(2))
    x = torch.randn(1, 2, 7, HEAD, generator=torch.Generator().manual_seed(3))
    q, _ = apply_rotary_pos_emb(x, x, *theirs(x, positions[:, None]))
    text = {"model_type": "qwen3_vl_text" if interleaved else "qwen2_5_vl", "rope_parameters": rope,
            "max_position_embeddings": 40960}
    found = checkpoints.text.rope(text, HEAD, Path())
    ours = reference.rotary(x[0].transpose(0, 1), *Rotary(found)(positions.T, torch.float32))
    torch.testing.assert_close(ours, q[0].transpose(0, 1), atol=8e-3, rtol=0)  # a float32 angle at 60,000


@pytest.mark.parametrize(("rope", "text", "wanted"), [
    (KINDS["default"], {}, 40960), (KINDS["yarn"], {}, 131072), (KINDS["yarn"], {"max_position_embeddings": 262144}, 262144),
    ({"rope_type": "yarn", "factor": 2.0}, {}, 81920), (KINDS["linear"], {}, 40960), (KINDS["llama3"], {}, 40960),
    ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 10240}, {}, 40960)])
def test_the_context_follows(rope: dict[str, Any], text: dict[str, Any], wanted: int, tmp_path: Path) -> None:
    """YaRN serves factor times the original positions; of two numbers the file means the larger."""
    assert read(tmp_path, rope, **text).max_context == wanted


@pytest.mark.parametrize(("rope", "words"), [
    ({"rope_type": "longrope", "factor": 4.0}, r"rope type 'longrope' is not supported; known: default, mrope, dynamic, lin"),
    ({"rope_type": "yarn", "factor": 0.5}, r"rope scaling by 0\.5 from 40960"),
    ({"rope_type": "yarn", "factor": "much"}, r"holds a value of the wrong kind"),
    ({"rope_type": "yarn", "original_max_position_embeddings": -4, "factor": 2}, r"from -4 positions")])
def test_what_is_refused(rope: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, rope)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "qwen2_5_vl", "qwen3_5_text"])
def test_logits_equal_with_yarn(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.get("text_config", config)
    text["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = checkpoints.read(tmp_path)
    assert checkpoint.rope.scaling is not None
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    tokens = torch.randint(0, 490, (150,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = oracle.logits(tmp_path, tokens)
    found = Plain(model=model, checkpoint=checkpoint).prefill(tokens, chunk=64)
    assert float((found - expected).abs().max()) < max(1e-4, 1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "qwen3_5_vl"])
def test_logits_far_beyond_32k_positions(name: str, tmp_path: Path) -> None:
    """A picture at 40,000, as behind a long text: positions are turned into angles themselves, not looked up in a table."""
    tiny.write(name, tmp_path)
    checkpoint = checkpoints.read(tmp_path)
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    pixels = np.random.default_rng(1).integers(0, 256, (96, 64, 3), np.uint8)
    tokens = [5, 6, *[tiny.IMAGE] * 6, *range(100, 130)]
    near, _ = mrope_positions(tokens, [Grid(t=1, h=6, w=4)], image_token_id=tiny.IMAGE, video_token_id=None, merge_size=2)
    far = near + 40_000
    with torch.no_grad():
        expected = oracle.model(tmp_path)(**oracle.inputs(tmp_path, tokens, [pixels]),
                                          position_ids=torch.tensor(far.T[:, None], dtype=torch.int64)).logits[0]
    found = Plain(model=model, checkpoint=checkpoint).prefill(tokens, [pixels], positions=far, chunk=7)
    assert float((found - expected).abs().max()) < max(1e-4, 1e-5 * float(expected.abs().max()))
