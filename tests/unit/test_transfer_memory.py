"""CacheMemory and Coverage: where a range's bytes lie, and that each of them is counted once."""

from __future__ import annotations

import pytest
import torch

from cache_transfer import spans
from cache_transfer.coverage import Coverage
from cache_transfer.layout import CacheLayout, Range
from cache_transfer.memory import CacheMemory
from cache_transfer.regions import Landing
from slipstream.errors import ConfigError, CoverageError, InternalError, ProtocolError
from slipstream.types import AttentionLayer, LinearLayer

LAYOUT = CacheLayout(model_name="m", weights_revision="r", block_size=4, kv_dtype="bfloat16", conv_dtype="bfloat16", layers=(
    LinearLayer(name="layers.0", key_heads=1, value_heads=1, key_head_size=2, value_head_size=2, conv_width=3),
    AttentionLayer(name="layers.1", kv_heads=1, head_size=2)))
CONV, RECURRENT, KV = 0, 1, 2
WHERE = Landing(blocks=(5, 0, 3), state_slot=1)


def tensors() -> dict[str, torch.Tensor]:
    return {"layers.0.conv": torch.arange(3 * 6 * 2, dtype=torch.float32).reshape(3, 6, 2).to(torch.bfloat16),
            "layers.0.recurrent": torch.arange(3 * 4, dtype=torch.float32).reshape(3, 1, 2, 2),
            "layers.1.kv": torch.arange(6 * 2 * 4 * 2, dtype=torch.float32).reshape(6, 1, 2, 4, 2).to(torch.bfloat16)}


def seen(memory: CacheMemory, where: Landing, *parts: Range) -> bytes:
    return b"".join(spans.views(memory.spans(where, parts)))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("first", "units"), [(0, 4), (0, 1), (3, 2), (2, 9), (11, 1), (0, 12)])
def test_rows_are_keys_then_values_block_by_block(first: int, units: int) -> None:
    held = tensors()
    wanted = b""
    for index, block in enumerate(WHERE.blocks):
        rows = [token % 4 for token in range(first, first + units) if token // 4 == index]
        wanted += as_bytes(held["layers.1.kv"][block, :, :, rows])
    assert seen(CacheMemory(LAYOUT, held), WHERE, Range(KV, first, units)) == wanted


def test_a_state_is_the_slot_and_may_be_cut_anywhere() -> None:
    held = tensors()
    memory = CacheMemory(LAYOUT, held)
    for tensor, name in ((CONV, "layers.0.conv"), (RECURRENT, "layers.0.recurrent")):
        whole = as_bytes(held[name][1])
        parts = Range(tensor, 0, 5), Range(tensor, 5, len(whole) - 5)
        assert seen(memory, WHERE, *parts) == whole


def test_a_block_beyond_4_gib_is_found() -> None:
    layout = CacheLayout(model_name="m", weights_revision="r", block_size=16, kv_dtype="float32", conv_dtype="float32",
                         layers=(AttentionLayer(name="layers.0", kv_heads=8, head_size=64),))
    kv = torch.empty((70_001, 8, 2, 16, 64))  # 64 KiB blocks; only the touched pages become real
    kv[70_000] = torch.arange(kv[70_000].numel()).reshape(kv[70_000].shape)
    found = CacheMemory(layout, {"layers.0.kv": kv}).spans(Landing(blocks=(70_000,), state_slot=None), [Range(0, 0, 16)])
    assert found.tolist() == [[kv.data_ptr() + 70_000 * (1 << 16), 1 << 16]], "one span, past 4 GiB"
    assert b"".join(spans.views(found)) == as_bytes(kv[70_000])


@pytest.mark.parametrize(("where", "part"), [
    (WHERE, Range(KV, 8, 5)), (WHERE, Range(CONV, 20, 5)), (Landing(blocks=(1,), state_slot=None), Range(CONV, 0, 4)),
    (Landing(blocks=(1,), state_slot=3), Range(CONV, 0, 4))])
def test_a_range_outside_the_prompt_is_refused(where: Landing, part: Range) -> None:
    with pytest.raises(ProtocolError):
        CacheMemory(LAYOUT, tensors()).spans(where, [part])


@pytest.mark.parametrize("block", [6, -1])
def test_a_block_outside_the_pool_is_a_bug(block: int) -> None:
    with pytest.raises(InternalError, match="pool of 6"):
        CacheMemory(LAYOUT, tensors()).spans(Landing(blocks=(block,), state_slot=0), [Range(KV, 0, 1)])


def test_only_tensors_that_are_what_the_layout_says_are_bound() -> None:
    for change, text in (({"layers.1.kv": tensors()["layers.1.kv"].transpose(2, 3)}, "strided"),
                         ({"layers.1.kv": torch.zeros(6, 1, 2, 4, 3, dtype=torch.bfloat16)}, "bytes"),
                         ({"layers.1.kv": torch.zeros(6, 1, 2, 4, 2, dtype=torch.bfloat16, device="meta")}, "meta")):
        with pytest.raises(ConfigError, match=text):
            CacheMemory(LAYOUT, {**tensors(), **change})
    with pytest.raises(ConfigError, match=r"no tensor layers\.1\.kv"):
        CacheMemory(LAYOUT, {name: tensor for name, tensor in tensors().items() if name != "layers.1.kv"})


def counted(parts: list[Range], *, tokens: int = 9) -> Coverage:
    coverage = Coverage(LAYOUT, tokens)
    for part in parts:
        coverage.check([part])
        coverage.add([part])
    return coverage


WHOLE = [Range(CONV, 0, 24), Range(RECURRENT, 0, 16), Range(KV, 0, 9)]
CUT = [Range(KV, 0, 4), Range(CONV, 0, 7), Range(KV, 4, 5), Range(RECURRENT, 0, 16), Range(CONV, 7, 17)]


def test_coverage_does_not_depend_on_the_frames() -> None:
    whole, cut = counted(WHOLE), counted(CUT)
    assert whole.complete
    assert cut.complete
    assert (whole.kv_bytes, whole.state_bytes) == LAYOUT.bytes_necessary(9)
    cut.verify(whole.kv_bytes, whole.state_bytes)


@pytest.mark.parametrize("part", [Range(KV, 5, 1), Range(KV, 3, 2), Range(KV, 0, 4), Range(KV, 4, 6), Range(KV, 4, 0),
                                  Range(CONV, 0, 25), Range(3, 0, 1), Range(KV, 4, 1 << 63)])
def test_a_gap_a_repeat_and_an_excess_are_refused_before_they_land(part: Range) -> None:
    coverage = counted([Range(KV, 0, 4)])
    with pytest.raises(ProtocolError):
        coverage.check([part])


def test_a_repeat_inside_one_frame_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Coverage(LAYOUT, 9).check([Range(KV, 0, 4), Range(KV, 0, 4)])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_one_missing_tensor_is_noticed(missing: int) -> None:
    parts = [part for number, part in enumerate(WHOLE) if number != missing]
    coverage = counted(parts)
    assert not coverage.complete
    with pytest.raises(CoverageError, match=r"0 of \d+ units"):
        coverage.verify(coverage.kv_bytes, coverage.state_bytes)


def test_totals_must_be_the_source_s() -> None:
    whole = counted(WHOLE)
    with pytest.raises(CoverageError, match="were sent"):
        whole.verify(whole.kv_bytes + 1, whole.state_bytes)
