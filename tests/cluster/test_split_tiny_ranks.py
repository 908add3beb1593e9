"""Split greedy output equals transformers' where prefill is cut among tensor ranks and decode into stages, for every family."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support import oracle, tiny
from tests.support.cluster import Cluster
from tests.support.tiny_prompts import MAX_TOKENS, prompts_for
from tests.support.worker_client import pair

SEED = 1  # see tests/contract/test_models_geometries.py


@pytest.mark.parametrize("name", tiny.deployed("qwen3_moe with whole experts"))
async def test_tp2_to_pp2_equals_transformers(name: str, tmp_path: Path) -> None:
    name, _, whole = name.partition(" ")
    folder, cluster = tiny.write(name, tmp_path / name, SEED), Cluster(tmp_path)
    shared = [f"model.path={folder}", "engine.kv_cache_tokens=8192", "engine.prefill_chunk_tokens=23"]
    prompts = prompts_for(name)
    apart = [*shared, "pools.prefill.expert_parallel=true"] if whole else shared
    try:
        prefill, decode = cluster.start_gang("prefill", 2, 1, apart)[0], cluster.start_gang("decode", 1, 2, shared)[0]
        async with pair(prefill.address, decode.address) as both:
            answers = await asyncio.gather(*(both.ask(prompt) for prompt in prompts))
            await both.until_empty()
        for prompt, answer in zip(prompts, answers, strict=True):
            right = await asyncio.to_thread(oracle.greedy, folder, prompt.tokens, prompt.pixels, MAX_TOKENS)
            assert answer.tokens == right, f"{len(prompt.tokens)} tokens, {len(prompt.pixels)} pictures"
    finally:
        codes = cluster.close()
    assert set(codes.values()) == {0}
