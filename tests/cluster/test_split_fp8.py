"""Real processes on a text-only MoE with `model.language_model.` names, weights in FP8 blocks, and KV in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import checkpoint as checkpoints
from slipstream.config import EngineConfig, ModelConfig
from slipstream.engine import build
from slipstream.v1 import worker_pb2 as pb
from tests.support import fp8, tiny
from tests.support.cluster import Cluster
from tests.support.engine_driver import request as asked
from tests.support.engine_driver import run
from tests.support.worker_client import Prompt, pair

QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [24, 40],
                "modules_to_not_convert": ["lm_head", "model.language_model.layers.0.mlp.gate"]}
STEM = "model.language_model.layers.3.self_attn."
PROMPTS = [[int(token) for token in np.random.default_rng(length).integers(1, 490, length)] for length in (1, 16, 17, 90)]
FP8_KV = "engine.kv_dtype=fp8_e4m3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    plain = tiny.write("qwen3_5_moe_text", root / "plain", 1)
    tensors = load_file(plain / "model.safetensors")
    save_file({name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()},
              plain / "model.safetensors")
    fp8.convert(plain, root / "model", QUANTIZATION, (24, 40), "_scale_inv", stored=torch.bfloat16,
                more={STEM + "k_scale": torch.tensor(0.02), STEM + "v_scale": torch.tensor(0.004)})
    return root / "model"


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`prefill-0` of two stages and `decode-0` keep KV in FP8, `decode-1` in float32."""
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    shared = [f"model.path={folder}", "engine.kv_cache_tokens=4096"]
    cluster.start_each(("decode", [*shared, FP8_KV]), ("decode", shared))
    cluster.start_gang("prefill", 1, 2, [*shared, FP8_KV])
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


def unsplit(folder: Path, kv_dtype: str) -> list[list[int]]:
    torch.set_num_threads(1)
    engine = build.build(checkpoints.read(folder), ModelConfig(device="cpu"), EngineConfig(kv_cache_tokens=4096,
                                                                                          kv_dtype=kv_dtype))
    found = []
    for number, tokens in enumerate(PROMPTS):
        engine.submit(asked(f"r{number}", tokens, 20, ignore_eos=True))
        found.append(run(engine).tokens[f"r{number}"])
    return found


async def test_greedy_tokens_equal_unsplit_ones_and_one_byte_a_number_travels(cluster: Cluster, folder: Path) -> None:
    expected = unsplit(folder, "fp8_e4m3")
    assert expected != unsplit(folder, "auto"), "a cache in float32 would be seen"
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as both:
        for tokens, right in zip(PROMPTS, expected, strict=True):
            answer = await both.ask(Prompt(tokens=tokens, max_tokens=20, ignore_eos=True))
            assert answer.tokens == right
            assert answer.decode.kv_bytes == len(tokens) * 2 * 2 * 32  # one layer's keys and values, two heads
        await both.until_empty()


async def test_another_kv_dtype_is_refused_by_both_names_and_prefill_serves_on(cluster: Cluster) -> None:
    """KV-13; also what the scales are is said."""
    prompt = Prompt(tokens=PROMPTS[2], max_tokens=4, ignore_eos=True)
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-1"].address) as odd:
        assert odd.decode.info.compatibility_hash != odd.prefill.info.compatibility_hash
        to_prefill, to_decode = await odd.submits(prompt)
        one, leg = await odd.prefill.submit(to_prefill), await odd.decode.submit(to_decode)
        failed = await leg.failed(5)
        assert failed.code == pb.ERROR_CODE_INCOMPATIBLE
        assert "kv_dtype: ours float32, theirs float8_e4m3fn" in failed.message
        assert "layer 3 kv_scales: ours absent, theirs k 0.0199" in failed.message
        await odd.prefill.cancel(to_prefill.handle)
        await one.failed(5)
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as both:
        assert len((await both.ask(prompt)).tokens) == 4
        await both.until_empty()
