"""What config.json and its neighbours say: both spellings, what Qwen3.5 leaves out, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError
from slipstream.types import AttentionLayer, LinearLayer, SamplingParams

DEMO: dict[str, Any] = json.loads((checkpoints.DEMO / "config.json").read_text())
PROCESSOR: dict[str, Any] = json.loads((checkpoints.DEMO / "preprocessor_config.json").read_text())


def read(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Checkpoint:
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return checkpoints.read(folder)


def demo(text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """The demo's config with changes; None removes a key."""
    config = copy.deepcopy(DEMO)
    for section, changes in ((config, top), (config["text_config"], text or {}), (config["vision_config"], vision or {})):
        section.update(changes)
        for key in [key for key, value in section.items() if value is None and key in changes]:
            del section[key]
    return config


def test_the_demo_is_read_whole() -> None:
    found = checkpoints.read(checkpoints.DEMO)
    assert [type(layer) for layer in found.layers] == ([LinearLayer] * 3 + [AttentionLayer]) * 2
    assert (found.rope.rotary_size, found.rope.mrope_section, found.rope.mrope_interleaved) == (32, (6, 5, 5), True)
    assert found.tie_embeddings
    assert found.eos_token_ids == {1913, 1911}, "generation_config.json knows more of them than config.json"
    assert found.sampling == SamplingParams(temperature=0.0)
    assert found.image is not None
    assert (found.image.factor, found.image.min_pixels, found.image.max_pixels) == (32, 1024, 1 << 20)


def test_the_old_spelling_says_the_same(tmp_path: Path) -> None:
    """Top-level rope_theta and rope_scaling with `type`, torch_dtype, processor_config.json."""
    rope = DEMO["text_config"]["rope_parameters"]
    old = demo(text={"rope_parameters": None, "rope_theta": rope["rope_theta"], "dtype": None,
                     "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"], "mrope_interleaved": True}},
               dtype=None, torch_dtype="bfloat16")
    found = read(tmp_path, old, processor_config={"image_processor": PROCESSOR})
    expected = checkpoints.read(checkpoints.DEMO)
    assert (found.rope, found.dtype, found.image) == (expected.rope, expected.dtype, expected.image)


def test_what_qwen3_5_leaves_out(tmp_path: Path) -> None:
    """Every fourth layer attends, a quarter of a head turns, axes are interleaved."""
    found = read(tmp_path, demo(text={"layer_types": None, "full_attention_interval": None, "partial_rotary_factor": None,
                                      "rope_parameters": {"rope_theta": 1e4, "mrope_section": [3, 3, 2]}}))
    assert [type(layer) for layer in found.layers] == ([LinearLayer] * 3 + [AttentionLayer]) * 2
    assert (found.rope.rotary_size, found.rope.mrope_interleaved) == (16, True)


def test_qwen2_5_vl_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    """The text's keys at the top, axes in sections, windows in pixels, no table of positions."""
    vision = {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
              "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
              "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2}
    found = read(tmp_path, {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 2, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936, "image_token_id": 151655,
        "vision_config": vision})
    assert found.vision is not None
    assert found.vision.windows == checkpoints.WindowConfig(side=4, full_blocks=frozenset({7, 15, 23, 31}))
    assert (found.rope.mrope_section, found.rope.mrope_interleaved, found.rope.rotary_size) == ((16, 24, 24), False, 128)
    assert (found.image and found.image.factor, found.tie_embeddings, len(found.layers)) == (28, True, 36)


def test_qwen2_vl_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    """A tower of 1280 channels, whose `hidden_size` is the language model's."""
    vision = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584,
              "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}
    found = read(tmp_path, {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "hidden_act": "silu",
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": 151645, "image_token_id": 151655,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": False, "vocab_size": 152064,
        "vision_config": vision}, preprocessor_config={"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14})
    assert found.vision is not None
    assert (found.vision.hidden_size, found.vision.intermediate_size, found.vision.out_hidden_size) == (1280, 5120, 3584)
    assert (found.vision.windows, found.vision.num_position_embeddings) == (None, 0)
    assert (found.rope.mrope_section, found.rope.mrope_interleaved, found.rms_norm_eps) == ((16, 24, 24), False, 1e-6)
    assert found.image is not None
    assert (found.image.factor, found.image.max_pixels, found.image.mean[0]) == (28, 12845056, 0.48145466)


def test_qwen3_vl_moe_as_it_lies_on_the_hub(tmp_path: Path) -> None:
    vision = {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
              "in_channels": 3, "intermediate_size": 4304, "model_type": "qwen3_vl_moe", "num_heads": 16,
              "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2,
              "temporal_patch_size": 2}
    text = {"model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_theta": 5000000, "vocab_size": 151936,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
    found = read(tmp_path, {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655,
                            "tie_word_embeddings": False, "text_config": text, "vision_config": vision})
    assert found.experts is not None
    assert (found.experts.count, found.experts.top_k, found.experts.normalise, len(found.experts.layers)) == (128, 8, True, 48)
    assert (found.rope.theta, found.rope.mrope_section, found.rope.mrope_interleaved) == (5e6, (24, 20, 20), True)
    assert found.vision is not None
    assert (found.vision.deepstack, found.intermediate_size) == ((8, 16, 24), 0)


def test_what_qwen3_vl_leaves_out(tmp_path: Path) -> None:
    """The whole head turns, axes are interleaved."""
    rope = {"rope_theta": 5e6, "mrope_section": [12, 10, 10], "rope_type": "default"}
    found = read(tmp_path, demo(text={"model_type": "qwen3_vl_text", "rope_parameters": rope, "partial_rotary_factor": None}))
    assert (found.rope.rotary_size, found.rope.mrope_interleaved) == (64, True)


def test_an_interval_of_two_and_its_own_list_wins(tmp_path: Path) -> None:
    two = read(tmp_path, demo(text={"layer_types": None, "full_attention_interval": 2}))
    assert [type(layer) for layer in two.layers] == [LinearLayer, AttentionLayer] * 4
    listed = read(tmp_path, demo(text={"full_attention_interval": 2}))
    assert [type(layer) for layer in listed.layers] == ([LinearLayer] * 3 + [AttentionLayer]) * 2


def test_the_tie_is_said_at_the_top_or_in_the_text(tmp_path: Path) -> None:
    assert read(tmp_path, demo(tie_word_embeddings=None)).tie_embeddings
    assert not read(tmp_path, demo(tie_word_embeddings=False)).tie_embeddings
    assert not read(tmp_path, demo(tie_word_embeddings=None, text={"tie_word_embeddings": None})).tie_embeddings


@pytest.mark.parametrize(("text", "vision", "top", "words"), [
    ({}, {}, {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported; known: fp8"),
    ({"quantization_config": {"quant_method": "awq"}}, {}, {}, "quant_method 'awq' is not supported"),
    ({"hidden_act": "relu"}, {}, {}, "hidden_act 'relu' is not supported; known: silu"),
    ({"attn_output_gate": False}, {}, {}, "attn_output_gate false"),
    ({"use_sliding_window": True}, {}, {}, "use_sliding_window"),
    ({"hidden_size": None}, {}, {}, "`hidden_size` is missing"),
    ({"linear_conv_kernel_dim": None}, {}, {}, "`linear_conv_kernel_dim` is missing"),
    ({}, {"depth": None}, {}, "`depth` is missing"),
    ({}, {"deepstack_visual_indexes": [1, 2]}, {}, r"indexes \[1, 2\] must ascend within the 2 blocks"),
    ({}, {"deepstack_visual_indexes": [1, 0]}, {}, r"indexes \[1, 0\] must ascend"),
    ({}, {"deepstack_visual_indexes": [0, 0]}, {}, r"indexes \[0, 0\] must ascend"),
    ({"num_hidden_layers": 1, "layer_types": None}, {"deepstack_visual_indexes": [0, 1]}, {}, "2 blocks, .* are 1 layers"),
    ({}, {"hidden_act": "quick_gelu"}, {}, "vision_config.hidden_act 'quick_gelu' is not supported"),
    ({}, {"window_size": 112, "fullatt_block_indexes": [1], "hidden_act": "silu"}, {}, "112 must be a multiple of patch_size"),
    ({}, {"window_size": 64, "fullatt_block_indexes": [1]}, {}, "hidden_act 'gelu_pytorch_tanh' is not .* known: silu"),
    ({}, {"window_size": 64, "hidden_act": None}, {}, "`fullatt_block_indexes` is missing"),
    ({}, {"num_position_embeddings": 145}, {}, "145 is not a square"),
    ({"rope_parameters": {"mrope_section": [6, 5], "partial_rotary_factor": 0.5}}, {}, {}, "three numbers .* add up to 16"),
    ({"rope_parameters": {"mrope_section": [6, 5, 6], "partial_rotary_factor": 0.5}}, {}, {}, "three numbers .* add up to 16"),
])
def test_what_would_compute_something_else_is_refused(tmp_path: Path, text: dict[str, Any], vision: dict[str, Any],
                                                      top: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, demo(text, vision, **top))


def test_sampling_of_requests_that_do_not_say(tmp_path: Path) -> None:
    file = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "repetition_penalty": 1.05, "max_new_tokens": 5}
    told = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    assert read(tmp_path, demo(), generation_config=file).sampling == told
    greedy = read(tmp_path, demo(), generation_config={**file, "do_sample": False, "top_k": -1}).sampling
    assert (greedy.temperature, greedy.top_k, greedy.repetition_penalty) == (0.0, 0, 1.05)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, demo()).sampling == SamplingParams(temperature=1.0)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0), ("top_p", "0.9"), ("top_k", -2), ("temperature", True),
                                             ("repetition_penalty", -1.0), ("min_p", float("nan"))])
def test_sampling_out_of_range_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} is .*; it must be a number from"):
        read(tmp_path, demo(), generation_config={name: value})


def test_a_processor_that_disagrees_with_the_tower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the image processor's patch_size is 14, the vision tower's 16"):
        read(tmp_path, demo(), preprocessor_config={**PROCESSOR, "patch_size": 14})


@pytest.mark.parametrize("content", ["{", "[]", '"text"'])
def test_a_config_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoints.read(tmp_path)
