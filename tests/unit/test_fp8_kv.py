"""Keys and values in FP8: what is stored and read, whose scales, how many bytes, and what two sides must have in common."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cache_transfer.layout import CacheLayout, differences
from slipstream.config import EngineConfig
from slipstream.engine import build, caches
from slipstream.errors import CheckpointError
from slipstream.kernels import reference
from slipstream.layers.batch import AttentionCache, LinearCache
from slipstream.models.quantized import Dequantiser
from slipstream.types import AttentionLayer
from tests.support import fp8
from tests.support.small import hybrid_checkpoint

E4M3 = torch.float8_e4m3fn
CHECKPOINT = hybrid_checkpoint()


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept(x: Tensor, scale: float) -> Tensor:
    """What a cache makes of x: the nearest of all numbers that e4m3fn has, times the scale; float64."""
    finite = fp8.VALUES[~np.isnan(fp8.VALUES)].astype(np.float64)
    wanted = x.double().numpy() / scale
    return torch.from_numpy(finite[np.abs(wanted[..., None] - finite).argmin(-1)] * scale)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.0125, 2.5), (3e-4, 3e-4)])
def test_attention_sees_what_fits_into_a_byte(scales: tuple[float, float]) -> None:
    """Written by slot, read by prefill and by batched decode; the last scales are so small that most of it saturates."""
    block, groups, heads, size, lengths = 4, 2, 6, 8, (17, 1, 8)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    tables = torch.stack([order[5 * i : 5 * i + 5] for i in range(3)]).int()
    kv = torch.full((24, groups, 2, block, size), float("nan")).to(E4M3)
    written = [(random(n, groups, size, seed=n), random(n, groups, size, seed=50 + n)) for n in lengths]
    for table, (keys, values) in zip(tables, written, strict=True):
        places = torch.arange(len(keys))
        reference.write_kv(kv, keys, values, table.long()[places // block] * block + places % block, scales)
    read = [(kept(keys, scales[0]), kept(values, scales[1])) for keys, values in written]
    assert all(not torch.allclose(keys.float(), was[0], rtol=1e-3) for (keys, _), was in zip(read, written, strict=True))
    query = random(3, heads, size, seed=9)
    found = reference.decode_attention(query, kv, tables, torch.tensor(lengths), scales)
    for i, (keys, values) in enumerate(read):
        for head in range(heads):
            group = head // (heads // groups)
            odds = (keys[:, group] @ query[i, head].double() / size**0.5).softmax(0)
            assert (found[i, head].double() - odds @ values[:, group]).abs().max() < 1e-5
        alone = reference.prefill_attention(query[i : i + 1], kv, tables[i], lengths[i] - 1, scales)
        assert (alone[0] - found[i]).abs().max() < 1e-6


def test_only_keys_and_values_become_smaller() -> None:
    config = EngineConfig(block_size=4, kv_cache_tokens=64, kv_dtype="fp8_e4m3")
    linear, attention = caches.allocate(CHECKPOINT.layers, config, 3, torch.bfloat16, torch.device("cpu"))
    assert isinstance(linear, LinearCache)
    assert isinstance(attention, AttentionCache)
    assert (linear.conv.dtype, linear.recurrent.dtype, attention.kv.dtype) == (torch.bfloat16, torch.float32, E4M3)
    assert attention.kv.nbytes == 16 * 2 * 2 * 4 * 16  # blocks, heads, k and v, tokens, channels


# Scales -----------------------------------------------------------------------------------------------------------------


def scales_of(folder: Path, **held: Tensor) -> tuple[tuple[float, float], ...]:
    save_file({name.replace("__", "."): tensor for name, tensor in held.items()}, folder / "model.safetensors")
    checkpoint = dataclasses.replace(CHECKPOINT, path=folder)
    return build.kv_cache(checkpoint, EngineConfig(kv_dtype="fp8_e4m3"), "bfloat16")[1]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"),
                                   ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")])
def test_scales_by_every_name(tmp_path: Path, prefix: str, names: tuple[str, str]) -> None:
    stem = prefix + "layers.1.self_attn."
    found = scales_of(tmp_path, **{stem + names[0]: torch.tensor(0.5), stem + names[1]: torch.tensor([0.25]).bfloat16(),
                                   "mtp.layers.1.self_attn.k_scale": torch.tensor(9.0)})
    assert found == ((1.0, 1.0), (0.5, 0.25))


def test_a_layer_without_scales_has_ones(tmp_path: Path) -> None:
    assert scales_of(tmp_path, norm=torch.ones(1)) == ((1.0, 1.0), (1.0, 1.0))
    assert build.kv_cache(CHECKPOINT, EngineConfig(), "bfloat16") == ("bfloat16", ()), "no file is read"


@pytest.mark.parametrize("bad", [torch.zeros(1), torch.tensor(-1.0), torch.tensor(torch.nan), torch.tensor(torch.inf),
                                 torch.ones(2)])
def test_a_scale_that_cannot_be_is_named(tmp_path: Path, bad: Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_scale in .*; known: one positive number"):
        scales_of(tmp_path, **{"model.layers.1.self_attn.k_scale": bad})


def test_two_scales_that_differ_are_named(tmp_path: Path) -> None:
    one, two = "model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.k_proj.k_scale"
    assert scales_of(tmp_path, **{one: torch.tensor(2.0), two: torch.tensor(2.0)})[1] == (2.0, 1.0)
    with pytest.raises(CheckpointError, match=r"k_scale in .* another scale of the same is"):
        scales_of(tmp_path, **{one: torch.tensor(2.0), two: torch.tensor(3.0)})


# Both sides -------------------------------------------------------------------------------------------------------------

LAYOUT = CacheLayout(model_name="m", weights_revision="r", layers=CHECKPOINT.layers, block_size=16, kv_dtype="float8_e4m3fn",
                     conv_dtype="bfloat16", kv_scales=((1.0, 1.0), (0.5, 0.25)))


@pytest.mark.parametrize("tokens", [1, 16, 1001])
def test_half_the_bytes_of_bfloat16_travel_and_as_much_state(tokens: int) -> None:
    layer, = (layer for layer in CHECKPOINT.layers if isinstance(layer, AttentionLayer))
    kv, state = LAYOUT.bytes_necessary(tokens)
    assert kv == tokens * 2 * layer.kv_heads * layer.head_size
    wide = dataclasses.replace(LAYOUT, kv_dtype="bfloat16", kv_scales=()).bytes_necessary(tokens)
    assert wide == (2 * kv, state)


@pytest.mark.parametrize(("change", "words"), [
    ({"kv_dtype": "bfloat16", "kv_scales": ()}, "kv_dtype: ours float8_e4m3fn, theirs bfloat16"),
    ({"kv_dtype": "float8_e4m3fnuz"}, "kv_dtype: ours float8_e4m3fn, theirs float8_e4m3fnuz"),
    ({"kv_scales": ((1.0, 1.0), (0.5, 0.5))}, "layer 1 kv_scales: ours k 0.5 v 0.25, theirs k 0.5 v 0.5")])
def test_another_number_or_another_scale_is_another_layout(change: dict[str, object], words: str) -> None:
    other = dataclasses.replace(LAYOUT, **change)  # type: ignore[arg-type]
    assert other.hash != LAYOUT.hash
    assert words in differences(LAYOUT.fields(), other.fields())


def test_a_caches_scale_is_no_weight() -> None:
    names = ["a.self_attn.k_scale", "a.self_attn.v_proj.output_scale", "a.weight"]
    assert Dequantiser(None, names).weights == ["a.weight"]
