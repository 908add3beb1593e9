"""Suite `parallel`: long prompts through two pipeline stages against one, on two cores, one thread a rank."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench import families, harness, workers
from bench.harness import Result, Row

LAYERS, TOKENS, CHUNK = 12, 2048, 256
SHAPE = {"num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 32}


def run(quick: bool) -> Result:
    """`quick`: one round of shorter prompts."""
    tokens, prompts, rounds = (512, 2, 1) if quick else (TOKENS, 4, 3)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        families.write("Qwen3ForCausalLM", folder, **SHAPE)
        settings = (f"model.path={folder}", f"engine.max_batch_tokens={CHUNK}", "transfer.parked_fraction=1.0",
                    "engine.kv_cache_tokens=65536")
        speeds: dict[int, list[float]] = {1: [], 2: []}
        addresses = {stages: stack.enter_context(workers.replica("prefill", folder, stages=stages, overrides=settings))
                     for stages in speeds}
        for number in range(rounds + 1):
            for stages, address in addresses.items():
                seconds = asyncio.run(_prefill(address, tokens, prompts))
                if number:  # the first round warms up
                    speeds[stages].append(tokens * prompts / seconds)
    rows: list[Row] = [{"workload": f"{prompts} prompts of {tokens} tokens, chunks of {CHUNK}", "method": f"PP{stages}",
                        "tokens_per_second": sorted(each)[len(each) // 2], "slowest": min(each), "fastest": max(each)}
                       for stages, each in speeds.items()]
    speedup = harness.paired_ratio(speeds[2], speeds[1])
    return Result(name="parallel", rows=rows, ratios={"PP2/PP1": speedup, "PP2/2xPP1": speedup / 2})


async def _prefill(address: str, tokens: int, prompts: int) -> float:
    """Seconds until each prompt has its first token; nobody decodes them, and the end of the Session ends them."""
    rng = np.random.default_rng(time.monotonic_ns())
    async with workers.Session(address) as session:
        began = time.monotonic()
        legs = [await session.submit(workers.asking(number + 1, rng.integers(0, 500, tokens).tolist(), 2))
                for number in range(prompts)]
        for leg in legs:
            await leg.until(tokens=1)
        return max(leg.tokens[0][1] for leg in legs) - began
