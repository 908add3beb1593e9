"""The engine on the demo checkpoint: every schedule of a prompt gives the same tokens, and they are the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO, Checkpoint
from slipstream.config import EngineConfig, ModelConfig
from slipstream.engine import build as engine_build
from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.errors import ConfigError
from slipstream.models import registry
from slipstream.models.registry import LanguageModel
from slipstream.types import FinishReason
from tests.support.engine_driver import Collector, assert_empty, poison, request, run, split
from tests.support.samples import Sample, Samples

MAX_TOKENS = 200


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    torch.set_num_threads(1)
    return checkpoints.read(DEMO)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> LanguageModel:
    return registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def samples(checkpoint: Checkpoint) -> Samples:
    return Samples(checkpoint)


@pytest.fixture(scope="module")
def chosen(samples: Samples) -> list[Sample]:
    """All samples: texts short and long, one image, two images of different size."""
    return samples.all()


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint, model: LanguageModel, chosen: list[Sample]) -> dict[str, list[int]]:
    """The tokens of each sample when nothing else is in the engine."""
    engine = make(model, checkpoint)
    found = {}
    for sample in chosen:
        engine.submit(of(sample, checkpoint), sample.pixels)
        found[sample.name] = run(engine).tokens[sample.name]
    return found


def make(model: LanguageModel, checkpoint: Checkpoint, **config: Any) -> Engine:
    values: dict[str, Any] = {"kv_cache_tokens": 16384, "max_running": 32, "max_batch_tokens": 512} | config
    engine = Engine(model, checkpoint, EngineConfig(**values))
    poison(engine)
    return engine


def of(sample: Sample, checkpoint: Checkpoint) -> GenerationRequest:
    return request(sample.name, sample.tokens, MAX_TOKENS, grids=sample.grids, stop=sorted(checkpoint.eos_token_ids))


def mixed(chosen: Sequence[Sample]) -> list[Sample]:
    """A text, an image and a two-image sample, the longest of their kind."""
    return [max((sample for sample in chosen if len(sample.grids) == images), key=lambda sample: len(sample.tokens))
            for images in (0, 1, 2)]


def test_alone_every_answer_is_right(alone: dict[str, list[int]], chosen: list[Sample], samples: Samples) -> None:
    assert {name: samples.decode(tokens) for name, tokens in alone.items()} == {s.name: s.answer for s in chosen}
    assert len(chosen) == 45
    assert {len(sample.grids) for sample in chosen} == {0, 1, 2}


def test_all_45_at_once_equal_their_answers_alone(
        checkpoint: Checkpoint, model: LanguageModel, chosen: list[Sample], alone: dict[str, list[int]]) -> None:
    engine = make(model, checkpoint, max_running=45)
    for sample in chosen:
        engine.submit(of(sample, checkpoint), sample.pixels)
    most = 0
    found = Collector()
    while engine.has_work:
        found.add(engine.step())
        most = max(most, engine.load().running)
    assert most >= 32, "they really ran at once"
    assert found.tokens == alone
    assert set(found.finish.values()) == {FinishReason.STOP}
    assert_empty(engine)


def test_a_crowded_engine_gives_the_same_answers(
        checkpoint: Checkpoint, model: LanguageModel, chosen: list[Sample], alone: dict[str, list[int]]) -> None:
    """Blocks and slots for a few at a time: everything is reused, prompts wait and decode beside each other's chunks."""
    engine = make(model, checkpoint, kv_cache_tokens=1024, max_running=3, max_batch_tokens=50, block_size=8)
    few = sorted(chosen, key=lambda sample: sample.name)[::3]
    for sample in few:
        engine.submit(of(sample, checkpoint), sample.pixels)
    assert run(engine).tokens == {sample.name: alone[sample.name] for sample in few}
    assert_empty(engine)


@pytest.mark.parametrize("chunk", [7, 64, 0])
def test_chunk_sizes_give_the_same_tokens(
        checkpoint: Checkpoint, model: LanguageModel, chosen: list[Sample], alone: dict[str, list[int]], chunk: int) -> None:
    engine = make(model, checkpoint, prefill_chunk_tokens=chunk)
    for sample in mixed(chosen):
        engine.submit(of(sample, checkpoint), sample.pixels)
    assert run(engine).tokens == {sample.name: alone[sample.name] for sample in mixed(chosen)}


@pytest.mark.parametrize("chunk", [7, 0])
def test_split_over_two_engines_gives_the_same_tokens(
        checkpoint: Checkpoint, model: LanguageModel, chosen: list[Sample], alone: dict[str, list[int]], chunk: int) -> None:
    prefill = make(model, checkpoint, prefill_chunk_tokens=chunk)
    decode = make(model, checkpoint)
    for sample in mixed(chosen)[1:]:
        prefill.submit(of(sample, checkpoint), sample.pixels)
        assert prefill.mrope(of(sample, checkpoint).id).delta < 0, "a lost delta would show"
        prefill.abort(of(sample, checkpoint).id)
    found = split(prefill, decode, [(of(sample, checkpoint), sample.pixels) for sample in mixed(chosen)])
    assert found.tokens == {sample.name: alone[sample.name] for sample in mixed(chosen)}
    assert set(found.finish.values()) == {FinishReason.STOP}


@pytest.mark.parametrize("length", [1, 16, 17])
def test_exact_counts_of_tokens(checkpoint: Checkpoint, model: LanguageModel, samples: Samples, length: int) -> None:
    """Prompts of one token, of exactly one block, and of one more; the first tokens of a longer output are a shorter one's."""
    tokens = (samples.encode("Remember these facts: tea=knife, key=36, bell=5, wood=door.") * 2)[:length]
    assert len(tokens) == length
    found: dict[int, list[int]] = {}
    for count in (1, 2, 16):
        req = request(f"r{count}", tokens, count, ignore_eos=True)
        engine = make(model, checkpoint)
        engine.submit(req)
        whole: Collector = run(engine)
        found[count] = whole.tokens[req.id.name]
        assert whole.finish[req.id.name] is FinishReason.LENGTH
        assert split(make(model, checkpoint), make(model, checkpoint), [(req, ())]).tokens == whole.tokens
    assert [len(found[count]) for count in (1, 2, 16)] == [1, 2, 16]
    assert found[16][:1] == found[1]
    assert found[16][:2] == found[2]


def test_build_makes_a_working_engine(checkpoint: Checkpoint, chosen: list[Sample], alone: dict[str, list[int]],
                                      caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="slipstream.engine")
    engine = engine_build.build(checkpoint, ModelConfig(device="cpu"), EngineConfig(kv_cache_tokens=2048, max_running=2))
    assert torch.get_num_threads() == 1
    sample = mixed(chosen)[1]
    engine.submit(of(sample, checkpoint), sample.pixels)
    assert run(engine).tokens[sample.name] == alone[sample.name]
    assert "loading weights" in caplog.text
    assert "float32 on cpu, 128 blocks of 16 tokens, 2 state slots" in caplog.text


def test_build_in_bfloat16_answers_right(checkpoint: Checkpoint, chosen: list[Sample], samples: Samples) -> None:
    engine = engine_build.build(checkpoint, ModelConfig(device="cpu", dtype="bfloat16"), EngineConfig(kv_cache_tokens=2048))
    for sample in mixed(chosen):
        engine.submit(of(sample, checkpoint), sample.pixels)
    found = run(engine)
    assert {name: samples.decode(tokens) for name, tokens in found.tokens.items()} == {s.name: s.answer for s in mixed(chosen)}


@pytest.mark.parametrize(("model_config", "match"), [
    (ModelConfig(device="tpu"), "auto, cpu or cuda"), (ModelConfig(device="cpu", dtype="int4"), "auto, float32 or bfloat16")])
def test_build_refuses_unknown_devices_and_dtypes(checkpoint: Checkpoint, model_config: ModelConfig, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        engine_build.build(checkpoint, model_config, EngineConfig())


def test_build_refuses_unknown_kv_dtypes(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype must be auto or fp8_e4m3, not 'fp8_e5m2'"):
        engine_build.build(checkpoint, ModelConfig(device="cpu"), EngineConfig(kv_dtype="fp8_e5m2"))
