"""Every registered architecture as it may lie on disk: prefixes, experts, shards, dtypes, extra and tied weights; damage."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream.errors import CheckpointError
from slipstream.models import registry
from tests.support import tiny

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
TINY = {"Qwen2ForCausalLM": "qwen2", "Qwen2VLForConditionalGeneration": "qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
        "Qwen3VLForConditionalGeneration": "qwen3_vl", "Qwen3VLMoeForConditionalGeneration": "qwen3_moe_vl",
        "Qwen3NextForCausalLM": "qwen3_next", "Qwen3_5ForCausalLM": "qwen3_5_text",
        "Qwen3_5ForConditionalGeneration": "qwen3_5_vl", "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
        "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_vl"}
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoints_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Weights]]:
    """A folder of an architecture, written by transformers, and its weights by the names that our modules give them."""
    torch.set_num_threads(1)
    made: dict[str, tuple[Path, Weights]] = {}

    def of(architecture: str) -> tuple[Path, Weights]:
        if architecture not in made:
            folder = tiny.write(TINY[architecture], tmp_path_factory.mktemp(architecture))
            made[architecture] = folder, {name: tensor.detach().clone() for name, tensor in load(folder).items()}
        return made[architecture]

    return of


def load(folder: Path) -> Weights:
    return dict(registry.load(checkpoints.read(folder), dtype=torch.float32, device=CPU).named_parameters())


def lay(folder: Path, like: Path, weights: Weights, files: int = 1, **config: object) -> Path:
    """A checkpoint folder with other weights, in so many files."""
    said = json.loads((like / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | config))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    names = sorted(weights)
    if files == 1:
        save_file({name: weights[name].contiguous() for name in names}, folder / "model.safetensors")
        return folder
    index = {name: f"model-{i % files}.safetensors" for i, name in enumerate(names)}
    for part in set(index.values()):
        save_file({name: weights[name].contiguous() for name in names if index[name] == part}, folder / part)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def same(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


PREFIXES = {
    "as in memory": {},
    "a language model inside": {"model.": "model.language_model.", "visual.": "model.visual."},
    "a causal model inside": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
}


def renamed(weights: Weights, prefixes: dict[str, str]) -> Weights:
    first = re.compile(r"^[^.]+\.")
    return {first.sub(lambda found: prefixes.get(found[0], found[0]), name): tensor for name, tensor in weights.items()}


def in_pieces(weights: Weights) -> Weights:
    found: Weights = {}
    for name, tensor in weights.items():
        stem, dot, leaf = name.rpartition(".experts.")
        if not dot:
            found[name] = tensor
            continue
        parts = {"gate": tensor.chunk(2, 1)[0], "up": tensor.chunk(2, 1)[1]} if leaf == "gate_up_proj" else {"down": tensor}
        found |= {f"{stem}.experts.{i}.{part}_proj.weight": matrix[i] for part, matrix in parts.items()
                  for i in range(len(matrix))}
    return found


def transposed(weights: Weights) -> Weights:
    return {name: tensor.transpose(1, 2) if ".experts." in name else tensor for name, tensor in weights.items()}


LAYOUTS: dict[str, Callable[[Weights], Weights]] = {"stacked": lambda weights: weights, "in pieces": in_pieces,
                                                    "transposed": transposed}
CASES = [(architecture, layout) for architecture in TINY
         for layout in (LAYOUTS if "Moe" in architecture or "Next" in architecture else ["stacked"])]


def test_every_registered_architecture_is_here() -> None:
    assert TINY.keys() == registry.architectures().keys()


@pytest.mark.parametrize(("architecture", "layout"), CASES)
def test_it_is_the_same_model_however_it_lies(checkpoints_of: Callable[[str], tuple[Path, Weights]], architecture: str,
                                              layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    like, weights = checkpoints_of(architecture)
    laid = LAYOUTS[layout](weights)
    for prefixes in PREFIXES.values():
        assert same(load(lay(tmp_path, like, renamed(laid, prefixes))), weights)
    assert same(load(lay(tmp_path, like, laid, files=3)), weights)
    for dtype in (torch.bfloat16, torch.float16):
        stored = {name: tensor.to(dtype) for name, tensor in laid.items()}
        assert same(load(lay(tmp_path, like, stored)), {name: tensor.to(dtype).float() for name, tensor in weights.items()})
    extra = {"mtp.layers.0.mlp.up_proj.weight": torch.zeros(2), "mtp.norm.weight": torch.zeros(2),
             "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2), "audio_tower.conv.weight": torch.zeros(3)}
    caplog.clear()
    with caplog.at_level("INFO", logger="slipstream.models.weights"):
        assert same(load(lay(tmp_path, like, laid | extra)), weights)
    assert [(record.levelname, record.getMessage().partition(": ")[2]) for record in caplog.records] == [
        ("INFO", "3 weights are not used by this model, such as model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("WARNING", "1 weights are not known and left out, such as audio_tower.conv.weight")]
    headless = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    assert len(headless) == len(weights) - 1
    caplog.clear()
    for tied in (LAYOUTS[layout](headless), laid):  # a head that is on disk all the same is not read
        assert same(load(lay(tmp_path, like, tied, tie_word_embeddings=True)), headless)
    assert not caplog.records, "a head beside a tied one is no surprise"


@pytest.mark.parametrize(("architecture", "layout"), CASES)
def test_a_damaged_weight_stops_loading_and_is_named(checkpoints_of: Callable[[str], tuple[Path, Weights]], architecture: str,
                                                     layout: str, tmp_path: Path) -> None:
    """One weight of each kind, drawn by the architecture: gone, of another shape, not finite; one too many; a short file."""
    like, weights = checkpoints_of(architecture)
    laid = LAYOUTS[layout](weights)
    kinds: dict[str, list[str]] = {}
    for name in laid:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    draw = random.Random(architecture + layout)
    chosen = {draw.choice(kinds[kind]) for kind in draw.sample(sorted(kinds), 4)}
    chosen |= {draw.choice(names) for kind, names in kinds.items() if ".experts." in kind}
    for name in sorted(chosen):
        held, shape = laid[name], re.escape(str(tuple(laid[name].shape)))
        less, more = {key: tensor for key, tensor in laid.items() if key != name}, torch.cat((held, held[:1]))
        spoilt = held.clone(memory_format=torch.contiguous_format)
        spoilt.view(-1)[-1] = draw.choice((torch.nan, torch.inf))
        for weights_on_disk, words in (
                (less, rf"lacks 1 weights: {re.escape(name)} {shape}"),
                (laid | {name: more}, rf"{re.escape(name)} in .*model\.safetensors: expected shape {shape}, "
                                      rf"found {re.escape(str(tuple(more.shape)))}"),
                (laid | {name: spoilt}, rf"{re.escape(name)} in .*model\.safetensors of shape {shape} holds NaN or infinity"),
                (laid | {name + "_more": held.clone()}, rf"does not have: {re.escape(name)}_more")):
            with pytest.raises(CheckpointError, match=words):
                load(lay(tmp_path, like, weights_on_disk))
    file = lay(tmp_path, like, laid, files=2) / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is not a complete safetensors file"):
        load(tmp_path)
