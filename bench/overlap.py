"""Suite `overlap`: how much of a transfer hides behind the computation of its prompt, over links slower and faster than it.

Exposed is what a transfer takes after the last layer's end; hidden is 1 - exposed / (bytes / link rate). The link is simulated
(`transfer.faults.bytes_per_second`), as a multiple of the rate at which the prompt's KV is made.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import families
from bench.harness import Result, Row
from bench.pair import ROOT
from cache_transfer.layout import CacheLayout
from cache_transfer.load import CacheLoader
from cache_transfer.memory import CacheMemory, tune_allocator
from cache_transfer.paths import open_paths
from cache_transfer.regions import Landing
from slipstream.checkpoint import Checkpoint
from slipstream.config import EngineConfig, TransferConfig
from slipstream.engine.caches import allocate
from slipstream.layers.batch import AttentionCache, LayerCache

LAYERS = 8
SHAPE = {"num_hidden_layers": LAYERS, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 32}
LENGTHS = (512, 2048, 8192)
MULTIPLES = (0.5, 1.0, 2.0)


def engine_config() -> EngineConfig:
    """Of both sides: room for one long prompt; a prompt is one chunk, so that only layers overlap, or at most two."""
    return EngineConfig(kv_cache_tokens=12288, max_running=2, max_batch_tokens=8192, prefix_cache=False)


def layout_of(checkpoint: Checkpoint) -> CacheLayout:
    """In float32."""
    return CacheLayout(model_name="bench", weights_revision="none", layers=checkpoint.layers, block_size=16,
                       kv_dtype="float32", conv_dtype="float32")


def memory_of(layout: CacheLayout, caches: Sequence[LayerCache]) -> CacheMemory:
    """Of a model that has attention layers only."""
    return CacheMemory(layout, {f"{layer.name}.kv": cache.kv for layer, cache in zip(layout.layers, caches, strict=True)
                                if isinstance(cache, AttentionCache)})


def run(quick: bool) -> Result:
    """`quick`: one short prompt over one link."""
    tune_allocator()
    with tempfile.TemporaryDirectory() as name:
        checkpoint = families.write("Qwen3ForCausalLM", Path(name), **SHAPE)
        rows = asyncio.run(_measure(checkpoint, LENGTHS[:1] if quick else LENGTHS, MULTIPLES[1:2] if quick else MULTIPLES,
                                    1 if quick else 3))
    ratios = {}
    for row in rows:
        at = f"{row['tokens']} tokens, link {row['link']}x"
        ratios[f"hidden/transfer {at}"] = float(row["hidden"])
        ratios[f"TTFT/colocated {at}"] = float(row["ttft_ratio"])
    return Result(name="overlap", rows=rows, ratios={**ratios, "1-1/layers": 1 - 1 / LAYERS, "1-2/layers": 1 - 2 / LAYERS})


async def _measure(checkpoint: Checkpoint, lengths: Sequence[int], multiples: Sequence[float], rounds: int) -> list[Row]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.producer", str(checkpoint.path), cwd=ROOT,
                                                 env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    try:
        return [row for tokens in lengths for row in await _length(child, checkpoint, tokens, multiples, rounds)]
    finally:
        child.kill()
        await child.wait()


async def _length(child: asyncio.subprocess.Process, checkpoint: Checkpoint, tokens: int, multiples: Sequence[float],
                  rounds: int) -> list[Row]:
    number = 0

    async def alone() -> dict[str, Any]:
        nonlocal number
        number += 1
        return await _told(child, prompt=tokens, id=f"alone {tokens} {number}")

    layout = layout_of(checkpoint)
    necessary = sum(layout.bytes_necessary(tokens))
    await alone()
    before = await alone()
    production = necessary / (before["layers_end"] - before["submitted"])
    links = {multiple: (await _told(child, serve=multiple * production))["address"] for multiple in multiples}
    found: dict[float, list[tuple[float, float]]] = {multiple: [] for multiple in multiples}
    for _ in range(rounds if tokens < max(LENGTHS) else 1):  # the longest takes long enough to be steady
        for multiple, address in links.items():
            base = await alone()
            number += 1
            times, end = await _split(child, layout, checkpoint, address, tokens, f"split {tokens} {number}",
                                      multiple * production)
            exposed = max(0.0, end - times["layers_end"])
            found[multiple].append((1 - exposed / (necessary / (multiple * production)),
                                    (times["first_token"] - times["submitted"]) / (base["first_token"] - base["submitted"])))
    return [{"tokens": tokens, "link": multiple, "bytes": necessary, "link_bytes_per_second": multiple * production,
             "hidden": statistics.median(hidden for hidden, _ in each), "least_hidden": min(hidden for hidden, _ in each),
             "ttft_ratio": statistics.median(ratio for _, ratio in each)} for multiple, each in found.items()]


async def _split(child: asyncio.subprocess.Process, layout: CacheLayout, checkpoint: Checkpoint, address: str, tokens: int,
                 name: str, rate: float) -> tuple[dict[str, Any], float]:
    """What the producer says of a prompt, and when its last byte was here and verified."""
    config = TransferConfig(channel="grpc")
    memory = memory_of(layout, allocate(checkpoint.layers, engine_config(), 0, torch.float32, torch.device("cpu")))
    loader = CacheLoader(memory, open_paths(config, memory.extent, process="d"), replica_id="d0", epoch=1, rank=0,
                         config=config)

    async def admit(num_tokens: int) -> Landing:
        return Landing(blocks=tuple(range(-(-num_tokens // 16))), state_slot=None)

    telling = asyncio.create_task(_told(child, prompt=tokens, id=name, rate=rate))
    loaded = await loader.load([address], transfer_id=name, attempt=0, source_epoch=1, request_id=name, remaining_seconds=120.0,
                               admit=admit)
    end = time.monotonic()
    await loaded.close(committed=True)
    times = await telling
    await loader.close()
    return times, end


async def _told(child: asyncio.subprocess.Process, **command: Any) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(command).encode() + b"\n")
    await child.stdin.drain()
    found: dict[str, Any] = json.loads(await child.stdout.readline())
    return found
