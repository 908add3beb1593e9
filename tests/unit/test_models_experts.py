"""Experts: what the operations compute, how the weights lie on disk, what a rank reads of them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream import sharding
from slipstream.checkpoint import Checkpoint, ExpertConfig
from slipstream.errors import CheckpointError, ConfigError
from slipstream.kernels import reference
from slipstream.layers.gated_delta import by_key_head
from slipstream.layers.parallel import Alone, Communicator
from slipstream.models import registry, weights
from slipstream.models.qwen import CausalLM
from slipstream.sharding import Geometry, Shard, heads_of
from slipstream.types import LinearLayer
from tests.support.counting import Counting
from tests.support.small import hybrid_checkpoint, random_model, sparse_checkpoint

CPU = torch.device("cpu")
STEM = "model.layers.1.mlp.experts"
WIDE = 24


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# What is computed -----------------------------------------------------------------------------------------------------


@settings(deadline=None)  # the first use of an operation takes torch a second
@given(tokens=st.integers(0, 9), count=st.integers(1, 6), seed=st.integers(0, 1000), normalise=st.booleans(), data=st.data())
def test_each_token_goes_to_its_likeliest_experts(tokens: int, count: int, seed: int, normalise: bool,
                                                  data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, count))
    logits = some(tokens, count, seed=seed)
    chosen, found = reference.top_experts(logits, top_k, normalise)
    for row in range(tokens):
        odds = logits[row].double().exp()
        likely = {expert: float(odds[expert] / odds.sum()) for expert in range(count)}
        best = sorted(likely, key=lambda expert: -likely[expert])[:top_k]
        assert chosen[row].tolist() == best
        scale = sum(likely[expert] for expert in best) if normalise else 1.0
        assert found[row].tolist() == pytest.approx([likely[expert] / scale for expert in best], rel=1e-5)


@settings(deadline=None)
@given(tokens=st.integers(0, 9), count=st.integers(1, 6), seed=st.integers(0, 1000), data=st.data())
def test_experts_are_weighted_and_summed(tokens: int, count: int, seed: int, data: st.DataObject) -> None:
    """Against one token after the other in float64; a token's neighbours change nothing."""
    top_k, hidden, wide = data.draw(st.integers(1, count)), 5, 3
    x, gate_up, down = some(tokens, hidden, seed=seed), some(count, 2 * wide, hidden, seed=1), some(count, hidden, wide, seed=2)
    chosen, scales = reference.top_experts(some(tokens, count, seed=seed + 1), top_k, normalise=False)
    found = reference.experts(x, gate_up, down, chosen, scales)
    assert found.shape == x.shape
    for row in range(tokens):
        expected = torch.zeros(hidden, dtype=torch.float64)
        for expert, scale in zip(chosen[row].tolist(), scales[row].tolist(), strict=True):
            gate, up = gate_up[expert, :wide].double() @ x[row].double(), gate_up[expert, wide:].double() @ x[row].double()
            expected += scale * (down[expert].double() @ (F.silu(gate) * up))
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=1e-5)


# How the weights lie on disk --------------------------------------------------------------------------------------------


def in_pieces(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A matrix for each expert and projection."""
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(STEM)}
    gate_up, down = tensors[f"{STEM}.gate_up_proj"], tensors[f"{STEM}.down_proj"]
    for expert in range(len(down)):
        for name, matrix in (("gate", gate_up[expert, :WIDE]), ("up", gate_up[expert, WIDE:]), ("down", down[expert])):
            found[f"{STEM}.{expert}.{name}_proj.weight"] = matrix.clone()
    return found


def transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs before outputs, as Qwen3-VL-MoE is published."""
    return {name: tensor.transpose(1, 2).contiguous() if name.startswith(STEM) else tensor for name, tensor in tensors.items()}


LAYOUTS = {"stacked": lambda tensors: tensors, "in pieces": in_pieces, "transposed": transposed}


def on_disk(folder: Path, layout: str, change: dict[str, Tensor | None] | None = None) -> Checkpoint:
    checkpoint = dataclasses.replace(sparse_checkpoint(), path=folder)
    tensors: dict[str, Tensor] = {name: each.detach() for name, each in random_model(checkpoint).named_parameters()}
    changed = LAYOUTS[layout](tensors) | (change or {})
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, folder / "model.safetensors")
    return checkpoint


def load(checkpoint: Checkpoint, comm: Communicator | None = None) -> CausalLM:
    return registry.load(checkpoint, dtype=torch.float32, device=CPU, comm=comm)


def rank_of(tp: int, rank: int, stages: tuple[int, ...] = (2,), expert_parallel: bool = False) -> Communicator:
    comm = Alone(2)
    comm.shard = Shard(geometry=Geometry(tp=tp, stages=stages, expert_parallel=expert_parallel), rank=rank)
    return comm


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_its_channels_of_every_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str,
                                                   tp: int) -> None:
    checkpoint = on_disk(tmp_path, layout)
    whole = dict(random_model(checkpoint).named_parameters())
    gate_up, down = whole[f"{STEM}.gate_up_proj"], whole[f"{STEM}.down_proj"]
    for rank in range(tp):
        read: dict[str, int] = {}
        monkeypatch.setattr(weights, "safe_open", lambda path, framework, read=read: Counting(path, framework, read))
        steps: list[tuple[int, int]] = []

        def step(done: int, total: int, steps: list[tuple[int, int]] = steps) -> None:
            steps.append((done, total))

        model = registry.load(checkpoint, dtype=torch.float32, device=CPU, comm=rank_of(tp, rank), progress=step)
        assert steps == [(i + 1, len(read)) for i in range(len(read))]
        own = slice(rank * WIDE // tp, (rank + 1) * WIDE // tp)
        found = dict(model.named_parameters())
        assert torch.equal(found[f"{STEM}.gate_up_proj"], torch.cat((gate_up[:, :WIDE][:, own], gate_up[:, WIDE:][:, own]), 1))
        assert torch.equal(found[f"{STEM}.down_proj"], down[..., own])
        assert torch.equal(found["model.layers.1.mlp.gate.weight"], whole["model.layers.1.mlp.gate.weight"])
        assert not any(each.is_meta for each in model.parameters())
        assert sum(read.values()) == sum(each.nbytes for each in found.values())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_its_own_experts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, tp: int) -> None:
    checkpoint = on_disk(tmp_path, layout)
    whole = dict(random_model(checkpoint).named_parameters())
    for rank in range(tp):
        read: dict[str, int] = {}
        monkeypatch.setattr(weights, "safe_open", lambda path, framework, read=read: Counting(path, framework, read))
        found = dict(load(checkpoint, rank_of(tp, rank, expert_parallel=True)).named_parameters())
        own = slice(rank * 4 // tp, (rank + 1) * 4 // tp)
        assert torch.equal(found[GATE_UP], whole[GATE_UP][own])
        assert torch.equal(found[DOWN], whole[DOWN][own])
        assert sum(read.values()) == sum(each.nbytes for each in found.values())


def test_only_a_model_with_experts_can_keep_them_whole() -> None:
    with pytest.raises(ConfigError, match="expert_parallel: Qwen3_5ForCausalLM has no experts"):
        sharding.plan(hybrid_checkpoint(), tp=2, pp=1, expert_parallel=True)


@pytest.mark.parametrize("wide", [32, 16, 24])
@pytest.mark.parametrize("layout", ["stacked", "transposed"])
def test_a_square_matrix_lies_as_its_neighbour_does(tmp_path: Path, layout: str, wide: int) -> None:
    """With 32 channels of an expert down_proj is square, with 16 gate_up_proj: its shape tells nothing."""
    small = sparse_checkpoint()
    assert small.experts is not None
    checkpoint = dataclasses.replace(small, path=tmp_path, experts=dataclasses.replace(small.experts, intermediate_size=wide))
    whole = {name: each.detach() for name, each in random_model(checkpoint).named_parameters()}
    save_file(LAYOUTS[layout](whole), tmp_path / "model.safetensors")
    found = dict(load(checkpoint).named_parameters())
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert all(each.is_contiguous() for each in found.values())


GATE_UP, ONE = f"{STEM}.gate_up_proj", f"{STEM}.2.up_proj.weight"
DOWN = f"{STEM}.down_proj"
BAD = torch.ones(WIDE, 32).index_fill(0, torch.arange(WIDE // 2, WIDE), torch.nan)


@pytest.mark.parametrize(("layout", "change", "rank", "words"), [
    ("stacked", {GATE_UP: None}, 0, r"lacks 1 weights: model\.layers\.1\.mlp\.experts\.gate_up_proj \(4, 48, 32\)"),
    ("stacked", {GATE_UP: torch.zeros(4, 32, 48)}, 0, r"gate_up_proj in .*expected shape \(4, 48, 32\), found \(4, 32, 48\)"),
    ("stacked", {GATE_UP: torch.zeros(5, 48, 32)}, 0, r"gate_up_proj in .*expected shape \(4, 48, 32\), found \(5, 48, 32\)"),
    ("stacked", {f"{STEM}.gate_up_bias": torch.zeros(1)}, 0, r"does not have: .*gate_up_bias"),
    ("transposed", {GATE_UP: None}, 0, r"lacks 1 weights: model\.layers\.1\.mlp\.experts\.gate_up_proj \(4, 32, 48\)"),
    ("transposed", {GATE_UP: torch.zeros(4, 48, 32)}, 1, r"gate_up_proj in .*expected .*\(4, 32, 48\), found \(4, 48, 32\)"),
    ("transposed", {DOWN: torch.zeros(4, 23, 32)}, 0, r"down_proj in .*expected shape \(4, 32, 24\), found \(4, 23, 32\)"),
    ("transposed", {DOWN: BAD.expand(4, -1, -1).contiguous()}, 1, r"down_proj in .* holds NaN"),
    ("transposed", {DOWN: BAD.expand(4, -1, -1).contiguous()}, 0, None),
    ("in pieces", {ONE: None}, 0, r"lacks 1 weights: model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight \(24, 32\)"),
    ("in pieces", {ONE: torch.zeros(32, 24)}, 1, r"2\.up_proj\.weight in .*expected shape \(24, 32\), found \(32, 24\)"),
    ("in pieces", {f"{STEM}.4.up_proj.weight": torch.zeros(24, 32)}, 0, r"does not have: .*experts\.4\.up_proj\.weight"),
    ("in pieces", {GATE_UP: torch.zeros(4, 48, 32)}, 0, r"does not have: .*experts\.gate_up_proj"),
    ("in pieces", {ONE: BAD}, 1, r"2\.up_proj\.weight in .* holds NaN"),
    ("in pieces", {ONE: BAD}, 0, None),
    ("in pieces", {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(3)}, 0, None),
])
def test_a_bad_expert_stops_loading_by_name(tmp_path: Path, layout: str, change: dict[str, Tensor | None], rank: int,
                                            words: str | None) -> None:
    checkpoint = on_disk(tmp_path, layout, change)
    if words is None:
        load(checkpoint, rank_of(2, rank))
        return
    with pytest.raises(CheckpointError, match=words):
        load(checkpoint, rank_of(2, rank))


def test_another_stage_has_no_concern_for_its_experts(tmp_path: Path) -> None:
    checkpoint = on_disk(tmp_path, "in pieces", {ONE: None})
    load(checkpoint, rank_of(1, 0, (1, 1)))
    with pytest.raises(CheckpointError, match="lacks 1 weights"):
        load(checkpoint, rank_of(1, 1, (1, 1)))


@given(keys=st.sampled_from([1, 2, 4]), readers=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4, 8]))
def test_rows_by_key_head_are_those_of_a_ranks_heads(keys: int, readers: int, tp: int) -> None:
    """Each row is named by its head; a rank must find, for each of its key heads, all of it and its own value heads twice."""
    values = keys * readers
    if values % tp:
        return
    layer = LinearLayer(name="", key_heads=keys, value_heads=values, key_head_size=3, value_head_size=2, conv_width=4)
    rows = []
    for key in range(keys):
        rows += [("key", key)] * 6
        for kind in "vz":
            rows += [(kind, value) for value in range(key * readers, (key + 1) * readers) for _ in range(2)]
    for rank in range(tp):
        cut = by_key_head(layer, Shard(geometry=Geometry(tp=tp, stages=(1,)), rank=rank), 6, 2)
        expected = []
        own = heads_of(values, tp, rank)
        for key in heads_of(keys, tp, rank):
            expected += [("key", key)] * 6
            for kind in "vz":
                expected += [(kind, value) for value in own if value // readers == key for _ in range(2)]
        assert cut.whole == len(rows)
        assert [rows[i] for part in cut.ranges for i in part] == expected


# What is declared -------------------------------------------------------------------------------------------------------


def read(folder: Path, **config: Any) -> Checkpoint:
    declared = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 32,
                "num_attention_heads": 4, "num_hidden_layers": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    (folder / "config.json").write_text(json.dumps(declared | config))
    return checkpoints.read(folder)


def test_both_names_of_the_number_of_experts(tmp_path: Path) -> None:
    expected = ExpertConfig(count=8, top_k=2, intermediate_size=24, shared_size=0, normalise=False, layers=frozenset(range(6)))
    assert read(tmp_path, num_experts=8).experts == expected
    found = read(tmp_path, num_local_experts=8)
    assert found.experts == expected
    assert (found.intermediate_size, found.intermediate_sizes) == (0, (24,)), "no layer is dense: its size may be left out"


def test_which_layers_are_dense(tmp_path: Path) -> None:
    found = read(tmp_path, num_experts=8, decoder_sparse_step=2, mlp_only_layers=[3], intermediate_size=48)
    assert [layer for layer in range(6) if found.experts_of(layer)] == [1, 5]
    assert found.intermediate_sizes == (48, 24)
    with pytest.raises(CheckpointError, match="`intermediate_size` is missing"):
        read(tmp_path, num_experts=8, mlp_only_layers=[3])


@pytest.mark.parametrize(("kind", "said", "normalise"), [
    ("qwen3_moe", None, False), ("qwen3_moe", True, True), ("qwen3_next", None, True), ("qwen3_next", False, False),
    ("qwen3_5_moe_text", None, True), ("qwen3_5_moe_text", False, True), ("qwen3_vl_moe_text", False, True)])
def test_whether_weights_are_normalised(tmp_path: Path, kind: str, said: bool | None, normalise: bool) -> None:
    experts = read(tmp_path, num_experts=8, model_type=kind, **({} if said is None else {"norm_topk_prob": said})).experts
    assert experts is not None
    assert experts.normalise == normalise


@pytest.mark.parametrize(("config", "words"), [
    ({"num_experts_per_tok": None}, "wrong kind"), ({"num_experts_per_tok": 9}, "it must be 1 to 8"),
    ({"num_experts_per_tok": 0}, "it must be 1 to 8"), ({"moe_intermediate_size": None}, "wrong kind")])
def test_experts_that_cannot_be_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, num_experts=8, **config)


def test_a_dense_class_does_no_experts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Qwen3ForCausalLM does not do: experts"):
        load(read(tmp_path, num_experts=8, architectures=["Qwen3ForCausalLM"]))


def test_tp_must_cut_every_expert(tmp_path: Path) -> None:
    checkpoint = read(tmp_path, num_experts=8, moe_intermediate_size=6, intermediate_size=48)
    assert sharding.legal_tp(checkpoint) == [1, 2]
    with pytest.raises(ConfigError, match=r"intermediate size 6\); legal: 1, 2"):
        sharding.plan(checkpoint, tp=4, pp=1)


def test_qwen3_next_turns_a_quarter_of_a_head_where_it_does_not_say(tmp_path: Path) -> None:
    assert read(tmp_path, num_experts=8, model_type="qwen3_next", head_dim=32).rope.rotary_size == 8
    assert read(tmp_path, num_experts=8, head_dim=32).rope.rotary_size == 32
