"""One small model, cut among ranks in one process: logits, caches, what is read from disk, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from slipstream.checkpoint import Checkpoint
from slipstream.errors import CheckpointError
from slipstream.layers.embedding import Vocabulary
from slipstream.layers.linear import Cut, Part
from slipstream.layers.parallel import Alone, Communicator
from slipstream.models import registry, weights
from slipstream.models.qwen import CausalLM
from slipstream.sharding import Geometry, Shard
from tests.support import ranks
from tests.support.counting import Counting
from tests.support.plain import Plain
from tests.support.small import hybrid_checkpoint, random_model

CPU = torch.device("cpu")
TOKENS = [int(token) for token in torch.randint(0, 37, (40,), generator=torch.Generator().manual_seed(5))]


def on_disk(folder: Path, *, tied: bool = False, change: dict[str, Tensor | None] | None = None) -> Checkpoint:
    """Three layers, biases, a vocabulary that no number of ranks divides, 2 key heads and 2 KV heads."""
    small = hybrid_checkpoint()
    linear, attention = small.layers
    layers = (linear, attention, dataclasses.replace(linear, name="layers.2"))
    checkpoint = dataclasses.replace(small, path=folder, layers=layers, vocab_size=37, attention_bias=True, tie_embeddings=tied)
    model = random_model(checkpoint)
    tensors: dict[str, Tensor | None] = {name: each.detach() for name, each in model.named_parameters()}
    kept = {name: each for name, each in (tensors | (change or {})).items() if each is not None}
    save_file(kept, folder / "model.safetensors")
    return checkpoint


def load(checkpoint: Checkpoint, comm: Communicator | None = None) -> CausalLM:
    return registry.load(checkpoint, dtype=torch.float32, device=CPU, comm=comm)


def compute(checkpoint: Checkpoint, comm: Communicator | None = None) -> tuple[Tensor, Plain]:
    """Chunks, then decode steps."""
    plain = Plain(model=load(checkpoint, comm), checkpoint=checkpoint)
    return torch.cat([plain.prefill(TOKENS[:30], chunk=11), *(plain.decode(token)[None] for token in TOKENS[30:])]), plain


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "stages"), [(1, (1, 2)), (2, (3,)), (2, (2, 1)), (4, (3,)), (4, (1, 1, 1))])
def test_a_cut_model_computes_what_the_whole_one_does(tmp_path: Path, tp: int, stages: tuple[int, ...], tied: bool) -> None:
    checkpoint = on_disk(tmp_path, tied=tied)
    expected, whole = compute(checkpoint)
    geometry = Geometry(tp=tp, stages=stages)
    found = ranks.run(geometry, lambda comm: compute(checkpoint, comm))
    for rank, (logits, plain) in enumerate(found):
        shard = Shard(geometry=geometry, rank=rank)
        if shard.last and shard.tp_rank == 0:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        else:
            assert logits.shape == (len(TOKENS), 0)
        assert plain.layers_done == list(shard.layers) * 13, "a layer reports by its number in the checkpoint"
        for index, cache in zip(shard.layers, plain.caches, strict=True):
            parts = ranks.part_of(whole.caches[index], checkpoint.layers[index], shard)
            for ours, theirs in zip(ranks.tensors_of(cache), parts, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("tokens", "tp"), [(12, 4), (10, 4), (5, 4), (7, 2)])
def test_a_vocabulary_need_not_divide(tokens: int, tp: int) -> None:
    """5 rows over 4 ranks are 2, 2, 1 and none."""
    table = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(tokens).flip(0)

    def one(comm: Communicator) -> tuple[Tensor, Tensor | None, Tensor | None]:
        part = Vocabulary(tokens, 6, comm)
        part.weight.copy_(table[part.rows.start : part.rows.stop])
        return part(ids), part.logits(table), part.logits(table[:0])

    found = ranks.run(Geometry(tp=tp, stages=(1,)), one)
    assert all(torch.equal(vectors, table[ids]) for vectors, *_ in found)
    first, none = found[0][1:]
    assert first is not None
    assert none is not None
    torch.testing.assert_close(first, table @ table.T)
    assert none.shape == (0, tokens)
    assert all(logits is None for _, *pair in found[1:] for logits in pair)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4), st.integers(0, 2))
def test_segments_are_cut_each_by_itself(segments: list[tuple[int, int]], power: int) -> None:
    """Of every segment each place is held by equally many ranks, in order; counts are 1, 2, 4 or 8 heads."""
    tp = 2**power
    cuts = []
    for rank in range(tp):
        shard = Shard(geometry=Geometry(tp=tp, stages=(1,)), rank=rank)
        joined, *rest = (Cut.heads(2 ** (count - 1), shard, size) for count, size in segments)
        for cut in rest:
            joined += cut
        cuts.append([place for part in joined.ranges for place in part])
        assert len(joined) == len(cuts[-1])
        assert cuts[-1] == sorted(set(cuts[-1]))
        start, at = 0, 0
        for count, size in segments:
            heads = 2 ** (count - 1)
            each = max(1, heads // tp) * size
            first = rank * heads // tp * size
            assert cuts[-1][at : at + each] == list(range(start + first, start + first + each))
            start, at = start + heads * size, at + each
        assert joined.whole == start


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_its_own_part_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    checkpoint = on_disk(tmp_path, tied=tied)
    geometry = Geometry(tp=2, stages=(1, 2))
    whole = {name: each.nbytes for name, each in load(checkpoint).named_parameters()}
    total: dict[str, int] = {}
    for rank in range(geometry.world):
        read: dict[str, int] = {}
        monkeypatch.setattr(weights, "safe_open", lambda path, framework, read=read: Counting(path, framework, read))
        comm = Alone(3)
        comm.shard = Shard(geometry=geometry, rank=rank)
        model = load(checkpoint, comm)
        assert read == {name: each.nbytes for name, each in model.named_parameters() if each.nbytes}
        assert sum(read.values()) < 0.7 * sum(whole.values())
        for name, count in read.items():
            total[name] = total.get(name, 0) + count
    replicated = {name: 2 for name in whole if "norm" in name or name.endswith("o_proj.bias")}  # on both ranks of a stage
    if tied:
        replicated["model.embed_tokens.weight"] = 2  # on both stages
    assert total == {name: count * replicated.get(name, 1) for name, count in whole.items()}


def test_parts_on_the_meta_device_name_what_they_take() -> None:
    comm = Alone(2)
    comm.shard = Shard(geometry=Geometry(tp=2, stages=(2,)), rank=1)
    model = registry.architectures()["Qwen3_5ForCausalLM"](hybrid_checkpoint(), random_model(hybrid_checkpoint()).kernels, comm)
    found = {name: (each.axis, each.cut) for name, each in model.named_parameters() if isinstance(each, Part)}
    assert found["model.layers.0.linear_attn.conv1d.weight"] == (0, Cut(64, (range(8, 16), range(24, 32), range(48, 64))))
    assert found["model.layers.1.self_attn.q_proj.weight"] == (0, Cut(128, (range(64, 128),)))  # [query | gate] of each head
    assert found["model.layers.1.self_attn.o_proj.weight"] == (1, Cut(64, (range(32, 64),)))
    assert "model.norm.weight" not in found


Q, LAST = "model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"
BAD_HALF = torch.ones(128, 32).index_fill(0, torch.arange(64, 128), torch.nan)


@pytest.mark.parametrize(("change", "rank", "words"), [
    ({Q: None}, 1, r"lacks 1 weights: model\.layers\.1\.self_attn\.q_proj\.weight \(128, 32\)"),
    ({Q: None}, 2, None),
    ({Q: torch.zeros(64, 32)}, 0, r"q_proj\.weight in .*expected shape \(128, 32\), found \(64, 32\)"),
    ({Q: BAD_HALF}, 1, r"q_proj\.weight in .* of shape \(128, 32\) holds NaN"),
    ({Q: BAD_HALF}, 0, None),
    ({LAST: None}, 3, r"lacks 1 weights: model\.layers\.2\.mlp\.up_proj\.weight \(48, 32\)"),
    ({"model.layers.3.mlp.up_proj.weight": torch.zeros(48, 32)}, 0, r"does not have: model\.layers\.3\.mlp\.up_proj"),
    ({"model.language_model.norm.weight": torch.zeros(32)}, 2, r"are the same weight"),
    ({"mtp.norm.weight": torch.zeros(3), "visual.x": torch.zeros(3)}, 1, None),
])
def test_each_rank_names_what_is_wrong_with_its_part(tmp_path: Path, change: dict[str, Tensor | None], rank: int,
                                                     words: str | None) -> None:
    """Layers 0 and 1 are on ranks 0 and 1, layer 2 on ranks 2 and 3; another rank's weights are no concern."""
    checkpoint = on_disk(tmp_path, change=change)
    comm = Alone(3)
    comm.shard = Shard(geometry=Geometry(tp=2, stages=(2, 1)), rank=rank)
    if words is None:
        load(checkpoint, comm)
        return
    with pytest.raises(CheckpointError, match=words):
        load(checkpoint, comm)


def test_one_rank_alone_copies_nothing() -> None:
    comm, x = Alone(2), torch.ones(3)
    assert comm.all_reduce(x) is x
    assert comm.gather(x) is x
    assert comm.broadcast(x, (3,), torch.float32) is x
    assert [comm.shard.first, comm.shard.last, list(comm.shard.layers)] == [True, True, [0, 1]]
    assert not any(isinstance(each, Part) and len(each.cut) != each.cut.whole
                   for each in random_model(hybrid_checkpoint()).parameters())
