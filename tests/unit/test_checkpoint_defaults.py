"""What a configuration leaves out means what transformers' own class of it assumes, key by key; sizes are asked for."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError
from tests.support import tiny

FAMILIES = [name for name in tiny.NAMES if name not in ("qwen3_tied_vl", "qwen3_5_text_tied", "qwen3_moe_mixed")]
OTHERWISE = {
    ("vision_config",),  # without it there is no tower; transformers assumes one of another size
    ("tie_word_embeddings",),  # the text's own word counts too
}
NAMED = {"num_local_experts": "num_experts", "text_config": "is missing", "head_dim": "mrope_section"}
"""What an error names instead: the other spelling; any key of a section; what the assumed size does not agree with."""


def keys(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys(value, (*above, key))


def without(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    found = section = copy.deepcopy(config)
    for key in path[:-1]:
        section = section[key]
    del section[path[-1]]
    return found


def read(folder: Path, config: dict[str, Any]) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    return dataclasses.replace(checkpoints.read(folder), path=Path())


def tried(folder: Path, config: dict[str, Any]) -> Checkpoint | str:
    try:
        return read(folder, config)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_left_out_means_what_transformers_assumes(name: str, tmp_path: Path) -> None:
    whole = tiny.declared(name)
    whole.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    compared, refused = set(), set()
    for path in keys(config):
        changed = without(config, path)
        if isinstance(ours := tried(tmp_path, changed), str):
            refused.add(path[-1])
            assert NAMED.get(path[-1], path[-1]) in ours
            continue
        if path in OTHERWISE:
            continue
        filled = type(whole).from_dict(copy.deepcopy(changed))
        filled.architectures = whole.architectures
        filled.save_pretrained(tmp_path)
        assert ours == read(tmp_path, json.loads((tmp_path / "config.json").read_text())), path
        compared.add(path[-1])
    assert compared >= {"rms_norm_eps", "rope_theta", "rope_parameters", "num_key_value_heads", "max_position_embeddings"}
    assert refused >= {"architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
    assert ("num_experts_per_tok" in refused) == ("moe" in name or "next" in name)


@pytest.mark.parametrize(("architecture", "config", "rotary"), [
    ("Qwen2VLForConditionalGeneration", "Qwen2VLTextConfig", "qwen2_vl.modeling_qwen2_vl.Qwen2VLRotaryEmbedding"),
    ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLTextConfig", "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding"),
    ("Qwen3VLForConditionalGeneration", "Qwen3VLTextConfig", "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding"),
    ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeTextConfig",
     "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextRotaryEmbedding"),
    ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", "qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding"),
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding"),
])
def test_rotation_where_nothing_is_said_of_it(tmp_path: Path, architecture: str, config: str, rotary: str) -> None:
    """Neither base, nor sections, nor the rotated part, nor even the model's type."""
    import transformers

    said = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "layer_types": ["full_attention"]}
    kind = getattr(transformers, config)
    fields = {name: value for name, value in said.items() if name in {field.name for field in dataclasses.fields(kind)}}
    module, _, name = rotary.rpartition(".")
    theirs = getattr(import_module(f"transformers.models.{module}"), name)(kind(**fields))
    ours = read(tmp_path, {**said, "architectures": [architecture]}).rope
    assert (ours.theta, list(ours.mrope_section or ())) == (theirs.config.rope_parameters["rope_theta"],
                                                            list(theirs.mrope_section))
    assert ours.rotary_size == 2 * len(theirs.inv_freq)
    assert ours.mrope_interleaved == (not architecture.startswith("Qwen2"))


def test_an_image_processor_that_says_nothing(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor

    tiny.declared("qwen2_vl").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 50176, "size": {"longest_edge": 3}}')
    found = checkpoints.read(tmp_path).image
    theirs = Processor(max_pixels=50176, size={"longest_edge": 3, "shortest_edge": 3136})
    assert found is not None
    assert (found.mean, found.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    assert (found.min_pixels, found.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"]) == (3136, 50176)
