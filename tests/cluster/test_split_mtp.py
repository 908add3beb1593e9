"""Real processes that draft: prefill of two tensor ranks, decode of two stages; and a prefill side that does not."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.v1 import worker_pb2 as pb
from tests.support import mtp, oracle, tiny
from tests.support.cluster import Cluster
from tests.support.tiny_prompts import MAX_TOKENS, prompts_for
from tests.support.worker_client import Prompt, pair


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Cluster]]:
    """`prefill-0` and `decode-0` draft, `prefill-1` does not."""
    folder = mtp.add_easy(tiny.write("qwen3_5_vl", tmp_path_factory.mktemp("qwen3_5_vl"), 1))
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    shared = [f"model.path={folder}", "engine.kv_cache_tokens=8192", "engine.prefill_chunk_tokens=23"]
    cluster.start_gang("prefill", 2, 1, [*shared, "speculative.tokens=2"])
    cluster.start_gang("decode", 1, 2, [*shared, "speculative.tokens=2"])
    cluster.start_each(("prefill", shared))
    yield folder, cluster
    assert set(cluster.close().values()) == {0}


def counted(cluster: Cluster, name: str) -> float:
    with urllib.request.urlopen(f"http://{cluster.processes['decode-0'].metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"slipstream_worker_spec_{name}_tokens_total{{"))


async def test_greedy_equals_transformers_and_drafts_are_right(served: tuple[Path, Cluster]) -> None:
    folder, cluster = served
    prompts = prompts_for("qwen3_5_vl")
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as both:
        for turn in ("first", "again"):  # again: decode has the blocks, and the draft layer's among them
            answers = await asyncio.gather(*(both.ask(prompt) for prompt in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                right = await asyncio.to_thread(oracle.greedy, folder, prompt.tokens, prompt.pixels, MAX_TOKENS)
                assert answer.tokens == right, f"{turn}: {len(prompt.tokens)} tokens, {len(prompt.pixels)} pictures"
                if turn == "first" and len(prompt.tokens) < 16:
                    assert answer.decode.kv_bytes == len(prompt.tokens) * 2 * (2 * 2 * 32) * 4, "of two layers"
        await both.until_empty()
    drafted, accepted = counted(cluster, "draft"), counted(cluster, "accepted")
    assert drafted > accepted > 0.1 * drafted


async def test_a_prefill_side_that_does_not_draft_is_refused_by_the_layer(served: tuple[Path, Cluster]) -> None:
    _, cluster = served
    prompt = Prompt(tokens=[5, 6, 7], max_tokens=4, ignore_eos=True)
    async with pair(cluster.processes["prefill-1"].address, cluster.processes["decode-0"].address) as odd:
        to_prefill, to_decode = await odd.submits(prompt)
        one, leg = await odd.prefill.submit(to_prefill), await odd.decode.submit(to_decode)
        failed = await leg.failed(5)
        assert failed.code == pb.ERROR_CODE_INCOMPATIBLE
        assert "layer 4: ours DraftLayer(name='mtp.layers.0'" in failed.message
        assert "theirs absent" in failed.message
        await odd.prefill.cancel(to_prefill.handle)
        await one.failed(5)
