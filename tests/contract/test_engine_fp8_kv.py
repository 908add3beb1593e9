"""KV in FP8: the tokens and logits of a float32 cache that holds the same numbers; split, in chunks, cut among ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream import sharding
from slipstream.checkpoint import Checkpoint
from slipstream.config import EngineConfig, ModelConfig
from slipstream.engine import build
from slipstream.engine.engine import Engine
from slipstream.kernels import reference
from slipstream.layers.batch import AttentionCache
from slipstream.layers.parallel import Communicator
from slipstream.models import registry, weights
from slipstream.models.qwen import CausalLM
from tests.support import fp8, ranks, tiny
from tests.support.engine_driver import poison, request, run, split
from tests.support.plain import Plain

E4M3 = torch.float8_e4m3fn
SCALES = {"qwen3": {i: (0.01 * (i + 1), 0.02) for i in range(4)}, "qwen3_5_text": {3: (0.03, 0.001)}}
PROMPTS = [[int(token) for token in np.random.default_rng(length).integers(0, 490, length)] for length in (1, 16, 37, 90)]


@pytest.fixture(scope="module", params=SCALES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights as they were, and scales of the cache beside them; some of the last one's values saturate."""
    torch.set_num_threads(1)
    made = tiny.write(request.param, tmp_path_factory.mktemp(request.param), 1)
    tensors = load_file(made / "model.safetensors")
    for layer, scales in SCALES[request.param].items():
        for which, scale in zip("kv", scales, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{which}_scale"] = torch.tensor(scale)
    save_file(tensors, made / "model.safetensors")
    return made


def engine(checkpoint: Checkpoint, **config: Any) -> Engine:
    values: dict[str, Any] = {"kv_cache_tokens": 16 * 40, "max_running": 6, "max_batch_tokens": 96,
                              "kv_dtype": "fp8_e4m3"} | config
    made = build.build(checkpoint, ModelConfig(device="cpu"), EngineConfig(**values))
    poison(made)
    return made


def as_fp8(numbers: Tensor, scale: float) -> Tensor:
    """What is left of numbers, by the table of all codes."""
    wanted = np.clip(numbers.double().numpy() / np.float32(scale), -448, 448)
    finite = fp8.VALUES[~np.isnan(fp8.VALUES)]
    return torch.from_numpy(finite[np.abs(wanted[..., None] - finite).argmin(-1)]) * torch.tensor(scale)


def meant(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    """A model whose cache is of float32, and holds what one of FP8 would mean."""
    write = reference.write_kv

    def writes(kv: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scales: tuple[float, float]) -> None:
        assert kv.dtype == torch.float32
        write(kv, as_fp8(keys, scales[0]), as_fp8(values, scales[1]), slots)

    monkeypatch.setattr(reference, "write_kv", writes)
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    model.scale_kv(weights.kv_scales(checkpoint))
    return model


def test_the_same_tokens_split_and_unsplit_at_any_chunking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoints.read(folder)
    asked = [(request(f"r{i}", tokens, 12, ignore_eos=True), ()) for i, tokens in enumerate(PROMPTS)]
    whole = engine(checkpoint)
    assert {cache.kv.dtype for cache in whole.caches if isinstance(cache, AttentionCache)} == {E4M3}
    for each, _ in asked:
        whole.submit(each)
    expected = run(whole).tokens
    for chunk in (7, 64):
        assert split(engine(checkpoint, prefill_chunk_tokens=chunk), engine(checkpoint), asked).tokens == expected
    model = meant(checkpoint, monkeypatch)
    plain = {}
    for i, tokens in enumerate(PROMPTS):
        sequence = Plain(model=model, checkpoint=checkpoint)
        plain[f"r{i}"] = sequence.greedy(int(sequence.prefill(tokens, chunk=16)[-1].argmax()), 12)
    assert plain == expected
    exact = engine(checkpoint, kv_dtype="auto")
    for each, _ in asked:
        exact.submit(each)
    assert run(exact).tokens != expected, "one that computed without FP8 would be seen"


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_logits_on_every_geometry_are_those_of_the_same_numbers(folder: Path, tp: int, pp: int,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over ranks may round a key to its neighbour in FP8, so that they agree less than in float32, but by far better
    than with other scales."""
    checkpoint, scales = checkpoints.read(folder), weights.kv_scales(checkpoints.read(folder))

    def compute(comm: Communicator, scales: Any = scales) -> Tensor:
        model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"), comm=comm)
        model.scale_kv(scales)
        plain = Plain(model=model, checkpoint=checkpoint)
        plain.caches = [AttentionCache(kv=cache.kv.to(E4M3)) if isinstance(cache, AttentionCache) else cache
                        for cache in plain.caches]
        return torch.cat([plain.prefill(PROMPTS[3], chunk=16), *(plain.decode(token)[None] for token in (5, 6, 7))])

    geometry = sharding.plan(checkpoint, tp=tp, pp=pp)
    found = ranks.run(geometry, compute)[geometry.world - tp]
    other = ranks.run(geometry, lambda comm: compute(comm, ((1e-3, 1e-3),) * 4))[geometry.world - tp]
    plain = Plain(model=meant(checkpoint, monkeypatch), checkpoint=checkpoint)
    expected = torch.cat([plain.prefill(PROMPTS[3], chunk=16), *(plain.decode(token)[None] for token in (5, 6, 7))])
    near = float((found - expected).abs().max())
    assert near < (1e-5 if tp == 1 else 0.02 * float(expected.abs().max()))
    assert float((other - expected).abs().max()) > 10 * near
