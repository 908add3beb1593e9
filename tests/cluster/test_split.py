"""Split greedy output equals transformers' greedy output, token for token, on the demo checkpoint.

Three prefill replicas with different chunk sizes and one decode replica, real processes, asked over Worker.Session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from slipstream import checkpoint
from slipstream.checkpoint import DEMO
from slipstream.types import AttentionLayer, LinearLayer, SamplingParams
from tests.support import oracle
from tests.support.cluster import Cluster
from tests.support.samples import Sample, Samples
from tests.support.worker_client import Answer, Pair, Prompt, pair

CHECKPOINT = checkpoint.read(DEMO)
STOPS = CHECKPOINT.eos_token_ids
CHUNKS = {"prefill-0": 0, "prefill-1": 7, "prefill-2": 64}
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("split"))
    cluster.start_each(("decode", []), *(("prefill", [f"engine.prefill_chunk_tokens={chunk}"]) for chunk in CHUNKS.values()))
    yield cluster
    complaints = [line for running in cluster.processes.values() for line in running.complaints()]
    assert set(cluster.close().values()) == {0}
    assert not complaints


@pytest.fixture
async def pairs(cluster: Cluster) -> AsyncIterator[list[Pair]]:
    """One pair for each chunk size."""
    async with AsyncExitStack() as stack:
        decode = cluster.processes["decode-0"].address
        pairs = [await stack.enter_async_context(pair(cluster.processes[name].address, decode)) for name in CHUNKS]
        yield pairs
        await asyncio.gather(*(both.until_empty() for both in pairs))


@pytest.fixture(scope="module")
def samples() -> Samples:
    return Samples(CHECKPOINT)


@pytest.fixture(scope="module")
def by_name(samples: Samples) -> dict[str, Sample]:
    return {sample.name: sample for sample in samples.all()}


def of(sample: Sample, max_tokens: int = 300) -> Prompt:
    return Prompt(tokens=sample.tokens, pixels=sample.pixels, grids=sample.grids, max_tokens=max_tokens, stop_ids=STOPS)


def cut_after_the_picture(sample: Sample) -> Prompt:
    """A prompt whose last token is an image placeholder."""
    assert CHECKPOINT.image_token_id is not None
    last = max(i for i, token in enumerate(sample.tokens) if token == CHECKPOINT.image_token_id)
    return Prompt(tokens=sample.tokens[: last + 1], pixels=sample.pixels, grids=sample.grids, max_tokens=MAX_TOKENS,
                  ignore_eos=True)


def longest_text(by_name: dict[str, Sample]) -> Sample:
    return max((sample for sample in by_name.values() if not sample.pixels), key=lambda sample: len(sample.tokens))


def prompts(by_name: dict[str, Sample]) -> dict[str, Prompt]:
    text, long = next(sample for sample in by_name.values() if not sample.pixels), longest_text(by_name)
    two = next(sample for sample in by_name.values() if len({pixels.shape for pixels in sample.pixels}) == 2)
    return {
        "text": of(text),
        "long text": of(long),
        "one image": of(by_name["img_lookup-0"]),
        "two images of different aspect": of(two),
        "last token is an image": cut_after_the_picture(by_name["img_count-0"]),
        "last token is the second image": cut_after_the_picture(two),
        "one token": Prompt(tokens=text.tokens[:1], max_tokens=MAX_TOKENS, ignore_eos=True),
        "one block": Prompt(tokens=text.tokens[:16], max_tokens=MAX_TOKENS, ignore_eos=True),
        "one block and a token": Prompt(tokens=text.tokens[:17], max_tokens=MAX_TOKENS, ignore_eos=True),
    }


def expected(prompt: Prompt) -> list[int]:
    return oracle.greedy(DEMO, prompt.tokens, prompt.pixels, prompt.max_tokens, sorted(prompt.stop_ids))


async def test_greedy_equals_transformers(pairs: list[Pair], by_name: dict[str, Sample]) -> None:
    asked = prompts(by_name)
    right = {name: await asyncio.to_thread(expected, prompt) for name, prompt in asked.items()}
    for both, chunk in zip(pairs, CHUNKS.values(), strict=True):
        for name, prompt in asked.items():
            answer = await both.ask(prompt)
            assert answer.tokens == right[name], f"{name}, chunks of {chunk or 'any size'}"


async def test_the_report_counts_every_byte(pairs: list[Pair], by_name: dict[str, Sample]) -> None:
    """Of a prompt that nobody has seen, and of the same again: only what decode does not have travels."""
    sample = by_name["img_lookup-0"]
    answer = await pairs[0].ask(replace(of(sample), salt="bytes"))
    layers = CHECKPOINT.layers
    kv = sum(2 * layer.kv_heads * layer.head_size * 4 for layer in layers if isinstance(layer, AttentionLayer))
    state = sum(4 * (sum(layer.conv_segments) * (layer.conv_width - 1)
                     + layer.value_heads * layer.key_head_size * layer.value_head_size)
                for layer in layers if isinstance(layer, LinearLayer))
    assert (answer.decode.kv_bytes, answer.decode.state_bytes) == (kv * len(sample.tokens), state)
    assert answer.decode.transfer_seconds > 0
    assert answer.decode.compute_seconds > 0
    assert answer.prefill.compute_seconds > 0
    assert answer.prefill.queue_seconds >= 0
    again = await pairs[0].ask(replace(of(sample), salt="bytes"))
    length, block = len(sample.tokens), 16
    assert (answer.prefill.cached_tokens, again.prefill.cached_tokens) == (0, (length - 1) // block * block)
    assert (again.decode.kv_bytes, again.decode.state_bytes) == (kv * (length % block), state)
    assert again.decode.cached_tokens == again.prefill.cached_tokens
    assert again.tokens == answer.tokens


async def test_three_choices_are_one_prefill_and_one_transfer(pairs: list[Pair], by_name: dict[str, Sample]) -> None:
    sample = by_name["img_describe-0"]
    prompt = replace(of(sample, 24), sampling=SamplingParams(temperature=8.0, seed=11))
    alone = [await pairs[0].ask(replace(prompt, choices=(choice,), salt=f"alone {choice}")) for choice in range(3)]
    together = await pairs[0].ask(replace(prompt, choices=(0, 1, 2), salt="together"))
    assert [together.tokens, *together.others.values()] == [one.tokens for one in alone]
    assert len({tuple(one.tokens) for one in alone}) == 3
    assert together.decode.kv_bytes == alone[0].decode.kv_bytes, "as much as for one"
    assert together.decode.state_bytes == alone[0].decode.state_bytes


async def test_a_resumed_request_goes_on_where_it_was(pairs: list[Pair], by_name: dict[str, Sample]) -> None:
    """After any number of tokens, sampled and penalised, on replicas that have never seen it."""
    sampling = SamplingParams(temperature=2.0, seed=5, frequency_penalty=0.3, repetition_penalty=1.2)
    for number, name in enumerate(("img_describe-0", "img_json-1")):
        prompt = replace(of(by_name[name], 20), sampling=sampling, ignore_eos=True)
        whole = (await pairs[number].ask(prompt)).tokens
        assert len(set(whole)) > 6
        for at in (1, 5, len(whole) - 1):
            rest = await pairs[2].ask(replace(prompt, output=whole[:at], salt=f"{name} {at}"))
            assert rest.tokens == whole[at:]
            assert rest.prefill.cached_tokens == 0


async def test_samples_are_right_with_8_in_flight(pairs: list[Pair], samples: Samples, by_name: dict[str, Sample]) -> None:
    room = asyncio.Semaphore(8)
    wrong: list[tuple[str, str, str]] = []

    async def ask(number: int, sample: Sample) -> None:
        async with room:
            answer = await pairs[number % len(pairs)].ask(of(sample))
        text = samples.decode(answer.tokens)
        if text != sample.answer:
            wrong.append((sample.name, text, sample.answer))

    await asyncio.gather(*(ask(number, sample) for number, sample in enumerate(by_name.values())))
    assert not wrong


def mixture(by_name: dict[str, Sample]) -> list[Prompt]:
    """32 prompts of 1 to several hundred tokens, with and without pictures, greedy and sampled, some stopped by length."""
    text = longest_text(by_name)
    base = [of(sample) for sample in list(by_name.values())[::2]]
    seeds = [Prompt(tokens=text.tokens[: 1 + 3 * i], max_tokens=5 + 6 * i, ignore_eos=True,
                    sampling=SamplingParams(temperature=3.0, top_p=0.95, seed=1000 + i)) for i in range(32 - len(base))]
    return base + seeds


async def test_32_at_once_equal_each_alone(pairs: list[Pair], by_name: dict[str, Sample]) -> None:
    both = pairs[0]
    asked = mixture(by_name)
    assert len(asked) == 32
    alone = [(await both.ask(prompt)).tokens for prompt in asked]
    before = len(both.decode.reports)
    together: list[Answer] = await asyncio.gather(*(both.ask(prompt) for prompt in asked))
    assert [answer.tokens for answer in together] == alone
    reports = both.decode.reports[before:]
    assert max(len(report.handle) for report in reports) > 8, "they ran together, and one report carried them"
    assert len(reports) < sum(len(answer.tokens) for answer in together) / 2


async def test_seeds_matter(pairs: list[Pair], by_name: dict[str, Sample]) -> None:
    def asked(seed: int, temperature: float = 6.0) -> Prompt:
        return Prompt(tokens=longest_text(by_name).tokens[:12], max_tokens=40, ignore_eos=True,
                      sampling=SamplingParams(temperature=temperature, seed=seed))

    first, same, other = [(await pairs[0].ask(asked(seed))).tokens for seed in (1, 1, 2)]
    assert first == same
    assert first != other
    elsewhere = (await pairs[2].ask(asked(1))).tokens
    assert elsewhere == first, "randomness belongs to the request, not to the replica"
