"""The planner: whatever the two geometries, every byte of a destination rank comes once, from a rank that holds it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache_transfer import plan, spans
from cache_transfer.coverage import Coverage
from cache_transfer.layout import CacheLayout, Kind, Range, TensorSpec, whole
from cache_transfer.memory import CacheMemory
from cache_transfer.regions import Landing
from slipstream import checkpoint as checkpoints
from slipstream import sharding
from slipstream.errors import IncompatibleError
from slipstream.sharding import Geometry, Shard
from slipstream.types import AttentionLayer, LayerSpec, LinearLayer
from tests.support import transfer_rig

TPS = (1, 2, 4, 8)
Numbers = npt.NDArray[np.int64]


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    """Any mix of layers that each of TPS can cut: 1 to 8 heads, or 24."""
    heads = st.sampled_from([1, 2, 4, 8, 24])
    layers: list[LayerSpec] = []
    for number in range(draw(st.integers(4, 6))):
        if draw(st.booleans()):
            layers.append(AttentionLayer(name=f"layers.{number}", kv_heads=draw(heads), head_size=draw(st.integers(1, 3))))
        else:
            layers.append(LinearLayer(name=f"layers.{number}", key_heads=draw(heads), key_head_size=draw(st.integers(1, 3)),
                                      value_heads=draw(st.sampled_from([8, 24])), value_head_size=draw(st.integers(1, 3)),
                                      conv_width=draw(st.integers(2, 4))))
    return CacheLayout(model_name="any", weights_revision="w", layers=tuple(layers), block_size=4, kv_dtype="bfloat16",
                       conv_dtype="bfloat16")


@st.composite
def geometries(draw: st.DrawFn, layout: CacheLayout) -> Geometry:
    count = len(layout.layers)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3)))
    return Geometry(tp=draw(st.sampled_from(TPS)),
                    stages=tuple(end - begin for begin, end in itertools.pairwise([0, *cuts, count])))


def numbered(spec: TensorSpec) -> list[Numbers]:
    """Each of a whole tensor's runs as [heads, bytes], every byte with a number of its own."""
    sizes = [heads * size for heads, size in spec.runs]
    everything = np.arange(sum(sizes)) + spec.layer * 1_000_000
    return [part.reshape(run) for part, run in zip(np.split(everything, np.cumsum(sizes)[:-1]), spec.runs, strict=True)]


def held(spec: TensorSpec, tp: int, tp_rank: int) -> Numbers:
    """What a tensor rank holds of it: heads that are fewer than ranks stand on neighbours, others are cut evenly."""
    return np.concatenate([np.split(run.repeat(max(1, tp // len(run)), axis=0), tp)[tp_rank].reshape(-1)
                           for run in numbered(spec)])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_byte_comes_once_from_a_rank_that_holds_it(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    source, to = data.draw(geometries(layout)), data.draw(geometries(layout))
    read: dict[int, set[int]] = {rank: set() for rank in range(source.world)}
    for rank in range(to.world):
        shard = Shard(geometry=to, rank=rank)
        plan.check(layout, shard)
        copies = plan.plan(layout, source, shard)
        here = {spec.name: np.full(held(spec, to.tp, shard.tp_rank).shape, -1) for spec in layout.tensors
                if spec.layer in shard.layers}
        for there, of_rank in copies.items():
            read[there].add(rank)
            origin = Shard(geometry=source, rank=there)
            assert of_rank, "no stream that carries nothing"
            for copy in of_rank:
                assert copy.spec.layer in origin.layers
                whole_spec = next(spec for spec in layout.tensors if spec.name == copy.spec.name)
                theirs = held(whole_spec, source.tp, origin.tp_rank)
                assert copy.spec.unit_bytes == sum(size for *_, size in copy.parts) * (2 if copy.spec.kind is Kind.KV else 1)
                for at_source, at_here, size in copy.parts:
                    assert (here[copy.spec.name][at_here : at_here + size] == -1).all(), "no byte twice"
                    here[copy.spec.name][at_here : at_here + size] = theirs[at_source : at_source + size]
        for spec in layout.tensors:
            if spec.layer in shard.layers:
                assert np.array_equal(here[spec.name], held(spec, to.tp, shard.tp_rank)), spec.name
        carried = sum(copy.spec.unit_bytes for of_rank in copies.values() for copy in of_rank)
        assert carried == sum(spec.unit_bytes for spec in layout.held(shard))
    assert 0 in read[0], "the ranks 0 always meet"
    for rank, found in read.items():
        assert found == plan.readers(layout, Shard(geometry=source, rank=rank), to)
    if source == to:
        assert all(found == {rank} for rank, found in read.items()), "ranks of equal geometries pair up"


def test_a_replicated_head_is_read_from_all_of_its_holders() -> None:
    layout = replace(transfer_rig.layout(), layers=(AttentionLayer(name="layers.0", kv_heads=2, head_size=4),))
    source = Geometry(tp=8, stages=(1,))
    for tp, reads in ((1, [[0], [], [], [], [0], [], [], []]), (4, [[0], [], [1], [], [2], [], [3], []]),
                      (8, [[rank] for rank in range(8)]), (16, [[2 * rank, 2 * rank + 1] for rank in range(8)])):
        found = [sorted(plan.readers(layout, Shard(geometry=source, rank=rank), Geometry(tp=tp, stages=(1,))))
                 for rank in range(8)]
        assert found == reads, tp


@pytest.mark.parametrize(("tp", "stages", "rank", "says"), [
    (3, (4,), 0, r"tp 3 does not cut the 2 heads of layers\.0\.conv"), (0, (4,), 0, "tp 0 is not 1 to 64"),
    (128, (4,), 0, "tp 128"), (2, (3, 2), 0, r"stages \[3, 2\] are not the model's 4 layers"), (2, (4, 0), 0, "stages"),
    (2, (), 0, "stages"), (2, (2, 2), 4, "no rank 4 in tp 2, pp 2")])
def test_a_geometry_that_does_not_fit_is_named(tp: int, stages: tuple[int, ...], rank: int, says: str) -> None:
    with pytest.raises(IncompatibleError, match=says):
        plan.check(transfer_rig.layout(), Shard(geometry=Geometry(tp=tp, stages=stages), rank=rank))


def test_all_reshards_of_the_demo_model_are_the_slices_of_the_whole_tensors() -> None:
    """Byte for byte in memory, rows in parts of blocks and states in parts; blocks and slots of others stay as they are."""
    checkpoint = checkpoints.read(checkpoints.DEMO)
    layout = CacheLayout(model_name="demo", weights_revision="w", layers=checkpoint.layers, block_size=4, kv_dtype="bfloat16",
                         conv_dtype="bfloat16")
    tokens, have = 11, 4
    at, to = Landing(blocks=(4, 0, 3), state_slot=1), Landing(blocks=(1, 2, 4), state_slot=0, have_tokens=have)
    generator = torch.Generator().manual_seed(1)
    everything: dict[str, Tensor] = {}
    for layer in layout.layers:
        shapes = ({"kv": (5, layer.kv_heads, 2, 4, layer.head_size)} if isinstance(layer, AttentionLayer) else
                  {"conv": (2, sum(layer.conv_segments), layer.conv_width - 1),
                   "recurrent": (2, layer.value_heads, layer.key_head_size, layer.value_head_size)})
        for kind, shape in shapes.items():
            dtype = torch.float32 if kind == "recurrent" else torch.bfloat16
            everything[f"{layer.name}.{kind}"] = torch.randn(shape, generator=generator).to(dtype)

    landed = {name: torch.zeros_like(tensor) for name, tensor in everything.items()}
    for spec in layout.tensors:
        if spec.kind is Kind.KV:
            for token in range(have, tokens):
                row = everything[spec.name][at.blocks[token // 4], :, :, token % 4]
                landed[spec.name][to.blocks[token // 4], :, :, token % 4] = row
        else:
            landed[spec.name][to.state_slot] = everything[spec.name][at.state_slot]
    geometries = [sharding.plan(checkpoint, tp=tp, pp=pp) for tp in (1, 2, 4) for pp in (1, 2, 3)]
    shards = {(geometry, rank): Shard(geometry=geometry, rank=rank)
              for geometry in geometries for rank in range(geometry.world)}
    sources = {key: CacheMemory(layout, transfer_rig.cut(layout, everything, shard), shard) for key, shard in shards.items()}
    for key, shard in shards.items():
        wanted = transfer_rig.cut(layout, landed, shard)
        for source in geometries:
            here = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            memory = CacheMemory(layout, here, shard)
            for rank, copies in plan.plan(layout, source, shard).items():
                theirs = sources[source, rank].narrowed([(copy.spec, copy.at_source) for copy in copies])
                ours = memory.narrowed([(copy.spec, copy.at_destination) for copy in copies])
                sent, arrived = Coverage(theirs, tokens, have), Coverage(ours, tokens, have)
                for number, spec in enumerate(theirs.tensors):
                    first, end = sent.done[number], spec.units(tokens)
                    for begin, stop in itertools.pairwise(sorted({first, first + 1, (first + end) // 2, end})):
                        ranges = [Range(number, begin, stop - begin)]
                        sent.add(ranges)
                        arrived.check(ranges)
                        payload = b"".join(spans.views(theirs.spans(at, ranges)))
                        spans.scatter(memoryview(payload), ours.spans(to, ranges))
                        arrived.add(ranges)
                assert sent.complete
                arrived.verify(sent.kv_bytes, sent.state_bytes)
            assert all(torch.equal(tensor, here[name]) for name, tensor in wanted.items()), (source, key)
    assert whole(layout) in shards.values()
