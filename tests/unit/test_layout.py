"""CacheLayout: exact sizes, and a hash that notices every field."""

from __future__ import annotations

import dataclasses

import pytest

from cache_transfer.layout import CacheLayout, Kind, differences
from slipstream.sharding import Geometry, Shard
from slipstream.types import AttentionLayer, DraftLayer, LinearLayer

LINEAR = LinearLayer(name="layers.0", key_heads=2, value_heads=4, key_head_size=3, value_head_size=5, conv_width=4)
FULL = AttentionLayer(name="layers.1", kv_heads=2, head_size=16)
HYBRID = CacheLayout(model_name="m", weights_revision="r1", layers=(LINEAR, FULL), block_size=16, kv_dtype="bfloat16",
                     conv_dtype="bfloat16")


def test_sizes_are_those_of_the_tensors() -> None:
    conv, recurrent, kv = HYBRID.tensors
    assert [(spec.name, spec.layer, spec.kind) for spec in HYBRID.tensors] == [
        ("layers.0.conv", 0, Kind.CONV), ("layers.0.recurrent", 0, Kind.RECURRENT), ("layers.1.kv", 1, Kind.KV)]
    assert conv.unit_bytes == (2 * 3 + 2 * 3 + 4 * 5) * 3 * 2  # q | k | v channels, 3 columns, bfloat16
    assert recurrent.unit_bytes == 4 * 3 * 5 * 4  # float32 whatever the model's dtype
    assert kv.unit_bytes == 2 * 2 * 16 * 2  # keys and values of 2 heads


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 1_000_000_000])
def test_bytes_are_a_constant_plus_a_slope_times_tokens(tokens: int) -> None:
    assert HYBRID.bytes_necessary(tokens) == (128 * tokens, 192 + 240)


@pytest.mark.parametrize("change", [
    {"model_name": "other"}, {"weights_revision": "r2"}, {"block_size": 32}, {"kv_dtype": "float16"}, {"conv_dtype": "float32"},
    {"recurrent_dtype": "bfloat16"}, {"protocol": "0"}, {"memory_order": "kv[token]"}, {"layers": (FULL, LINEAR)},
    {"layers": (LINEAR, dataclasses.replace(FULL, kv_heads=1))}, {"layers": (LINEAR, dataclasses.replace(FULL, head_size=8))},
    {"layers": (dataclasses.replace(LINEAR, conv_width=3), FULL)}, {"layers": (LINEAR,)}])
def test_the_hash_notices_every_field_and_the_difference_is_named(change: dict[str, object]) -> None:
    other = dataclasses.replace(HYBRID, **change)  # type: ignore[arg-type]
    assert other.hash != HYBRID.hash
    named = differences(HYBRID.fields(), other.fields())
    assert ("layer" if "layers" in change else next(iter(change))) in named
    assert "ours" in named
    assert "theirs" in named


def test_equal_layouts_are_equal_wherever_they_are_made() -> None:
    again = dataclasses.replace(HYBRID, layers=tuple(dataclasses.replace(layer) for layer in HYBRID.layers))
    assert again.hash == HYBRID.hash
    assert differences(HYBRID.fields(), again.fields()) == ""


def test_a_layer_that_drafts_adds_its_rows_and_one_state() -> None:
    """The state is whole on every tensor rank of the last stage; a side without it is refused with both values."""
    layer = DraftLayer(name="mtp.layers.0", kv_heads=2, head_size=16, hidden_size=96)
    layout = dataclasses.replace(HYBRID, layers=(LINEAR, FULL, layer))
    assert layout.bytes_necessary(5) == (2 * 128 * 5, 192 + 240 + 96 * 2)
    assert [spec.name for spec in layout.tensors[3:]] == ["mtp.layers.0.kv", "mtp.layers.0.hidden"]
    geometry = Geometry(tp=2, stages=(1, 2))
    for rank in (2, 3):
        kv, draft_kv, hidden = layout.held(Shard(geometry=geometry, rank=rank))
        assert (kv.unit_bytes, draft_kv.unit_bytes, hidden.unit_bytes) == (64, 64, 192)
    assert layout.hash != HYBRID.hash
    assert differences(layout.fields(), HYBRID.fields()) == f"layer 2: ours {layer!r}, theirs absent"
