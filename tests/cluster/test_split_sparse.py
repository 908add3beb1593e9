"""What a published text-only model with experts is like on disk (Qwen3.5 MoE, `model.language_model.` names, FP8 in blocks of
128 x 128, each expert a matrix of its own), served by a prefill and a decode replica of TP2 x PP2 each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors import safe_open

from slipstream import checkpoint as checkpoints
from slipstream.config import EngineConfig, ModelConfig
from slipstream.engine import build
from slipstream.text.chat import ChatTemplate
from slipstream.text.tokenizer import Tokenizer
from tests.support import fp8, oracle, tiny
from tests.support.cluster import Cluster
from tests.support.engine_driver import request as asked
from tests.support.engine_driver import run
from tests.support.traffic import Ask, Reply, send, until_healthy
from tests.support.worker_client import Prompt, pair

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

KEPT = ("linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate", "mlp.shared_expert_gate")
QUANTIZATION = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens",
                               *(f"model.language_model.layers.{i}.{module}" for i in range(8) for module in KEPT)]}
COUNT = 20
MESSAGE = {"role": "user", "content": "Which planet is closest to the sun?"}
PROMPTS = [[int(token) for token in np.random.default_rng(length).integers(1, 1900, length)] for length in (1, 16, 17, 90)]


@dataclass(frozen=True)
class Served:
    """A deployment, and two folders: of the checkpoint, and of what it means in float32."""

    cluster: Cluster
    folder: Path
    meant: Path


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("sparse")
    plain = tiny.write_sparse(root / "plain", tied=request.param == "tied")
    meant = fp8.convert(plain, root / "model", QUANTIZATION, (128, 128), "_scale_inv", stored=torch.bfloat16)
    cluster, shared = Cluster(root), [f"model.path={root / 'model'}", "engine.kv_cache_tokens=4096"]
    chunks = "engine.prefill_chunk_tokens=23"
    with ThreadPoolExecutor() as starting:
        gangs = list(starting.map(lambda role: cluster.start_gang(role, 2, 2, [*shared, chunks]), ("prefill", "decode")))
    cluster.start_router([ranks[0] for ranks in gangs], [shared[0]])
    yield Served(cluster, root / "model", meant)
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{served.cluster.processes['router-0'].address}", timeout=60) as client:
        await until_healthy(client, 30)
        yield client


def right(served: Served, tokens: list[int]) -> list[int]:
    """What transformers answers, out of the numbers that the checkpoint means."""
    return oracle.greedy(served.meant, tokens, (), COUNT)


def test_the_checkpoint_is_what_it_is_to_be(served: Served) -> None:
    checkpoint = checkpoints.read(served.folder)
    assert checkpoint.architecture == "Qwen3_5MoeForCausalLM"
    assert [type(layer).__name__ for layer in checkpoint.layers] == [*["LinearLayer"] * 3, "AttentionLayer"] * 2
    with safe_open(served.folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert ("lm_head.weight" in names) != checkpoint.tie_embeddings
        assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)
        up = "model.language_model.layers.7.mlp.experts.7.up_proj.weight"
        assert file.get_slice(up).get_dtype() == "F8_E4M3"
        assert file.get_slice(up).get_shape() == [160, 192], "each of two ranks has 80 rows, of two blocks"
        assert file.get_slice(up + "_scale_inv").get_shape() == [2, 2]
        assert not [name for name in names if any(f".{kept}." in name for kept in KEPT) and name.endswith("_scale_inv")]


async def test_tokens_are_those_of_one_process_and_of_transformers(served: Served) -> None:
    torch.set_num_threads(1)
    engine = build.build(checkpoints.read(served.folder), ModelConfig(device="cpu"), EngineConfig(kv_cache_tokens=4096))
    for number, tokens in enumerate(PROMPTS):
        engine.submit(asked(f"r{number}", tokens, COUNT, ignore_eos=True))
    alone = run(engine).tokens
    assert len({token for tokens in alone.values() for token in tokens}) > COUNT, "answers that say something"
    processes = served.cluster.processes
    async with pair(processes["prefill-0"].address, processes["decode-0"].address) as both:
        answers = await asyncio.gather(*(both.ask(Prompt(tokens=tokens, max_tokens=COUNT, ignore_eos=True))
                                         for tokens in PROMPTS))
        await both.until_empty()
    for number, (tokens, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert answer.tokens == alone[f"r{number}"] == right(served, tokens), f"{len(tokens)} tokens"
        assert answer.decode.kv_bytes > 0


async def test_health_chat_stream_and_completion(served: Served, client: httpx.AsyncClient) -> None:
    health = await client.get("/health")
    assert health.status_code == 200
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    tokenizer = Tokenizer(served.folder)
    prompt = tokenizer.encode(ChatTemplate(served.folder, tokenizer.quote).render([MESSAGE]))
    body: dict[str, Any] = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
    chat = Ask(name="chat", path="/v1/chat/completions", body={"messages": [MESSAGE], **body})
    completion = Ask(name="completion", path="/v1/completions", body={"prompt": PROMPTS[-1], **body})
    for ask, tokens in ((chat, prompt), (completion, PROMPTS[-1])):
        replies: list[Reply] = [await send(client, ask, stream=stream, model=model) for stream in (False, True)]
        assert replies[0] == replies[1], "streamed or not"
        assert replies[0].error == ""
        assert replies[0].usage == (len(tokens), COUNT)
        assert replies[0].choices[0].reason == "length"
        assert replies[0].choices[0].text == tokenizer.decode(right(served, tokens))
