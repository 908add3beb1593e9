"""Drafts by the plain reference, and output with and without them: one process, split, ranks, chunks, pictures, rollbacks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.models.qwen import CausalLM
from slipstream.types import Grid
from tests.support import engine_driver, mtp, tiny
from tests.support.drafting import RIGHT, Watched, engine
from tests.support.engine_driver import assert_empty, request, run
from tests.support.replica import replica

NAMES = ("qwen3_5_text_tied", "qwen3_5_vl", "qwen3_5_moe_text", "qwen3_next")
TOKENS = 14


def asks(name: str) -> list[tuple[GenerationRequest, list[np.ndarray]]]:
    """A text that ends inside a block, one that fills its blocks, and with pictures in the middle and at the end."""
    draw = np.random.default_rng(5)
    found: list[tuple[GenerationRequest, list[np.ndarray]]] = []
    shapes: list[tuple[str, int, list[tuple[int, int]], int]] = [("odd", 37, [], 0), ("whole", 32, [], 0)]
    if name.endswith("vl"):
        shapes += [("middle", 11, [(3, 2), (2, 4)], 6), ("last", 9, [(3, 5)], -1)]
    for what, before, sizes, behind in shapes:
        tokens = draw.integers(0, 490, before).tolist()
        for h, w in sizes:
            tokens += [tiny.VISION_START, *[tiny.IMAGE] * (h * w), tiny.VISION_END]
        tokens = tokens[:-1] if behind < 0 else tokens + draw.integers(0, 490, behind).tolist()
        pixels = [draw.integers(0, 256, (32 * h, 32 * w, 3), dtype=np.uint8) for h, w in sizes]
        asked = request(what, tokens, TOKENS, grids=[Grid(t=1, h=2 * h, w=2 * w) for h, w in sizes], ignore_eos=True,
                        images=[bytes([len(what), h, w]) * 4 for h, w in sizes])
        found.append((asked, pixels))
    return found


@dataclasses.dataclass
class Case:
    """A checkpoint, what it answers without drafts, and the reference for each whole text."""

    folder: Path
    asks: list[tuple[GenerationRequest, list[np.ndarray]]]
    outputs: dict[str, list[int]]
    references: dict[str, mtp.Reference]

    def texts(self) -> dict[str, list[int]]:
        return {asked.id.name: [*asked.tokens, *self.outputs[asked.id.name]] for asked, _ in self.asks}

    def check(self, model: Watched, name: str) -> None:
        """Every draft of a request that ran alone."""
        text, reference = self.texts()[name], self.references[name]
        assert model.made
        for one in model.made:
            first = one.row - len(one.tokens) + 1
            assert one.tokens[0] == text[first]
            expected = reference.drafts(first + 1, one.tokens[1:])
            assert float((one.logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())
        model.made.clear()


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    folder = mtp.add(tiny.write(request.param, tmp_path_factory.mktemp(request.param), seed=1))
    made = asks(request.param)
    plain, _ = engine(folder, 0, layer=False)
    for asked, pixels in made:
        plain.submit(asked, pixels)
    outputs = run(plain).tokens
    references = {asked.id.name: mtp.Reference(folder, [*asked.tokens, *outputs[asked.id.name]], pixels)
                  for asked, pixels in made}
    for asked, _ in made:
        told = references[asked.id.name].logits[len(asked.tokens) - 1 : -1].argmax(-1).tolist()
        assert told == outputs[asked.id.name], "transformers says the same"
    return Case(folder, made, outputs, references)


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("chunk", [7, 64])
def test_drafts_by_the_reference(case: Case, chunk: int, right: str) -> None:
    made, model = engine(case.folder, 3, prefill_chunk_tokens=chunk)
    model.right, model.texts = RIGHT[right], list(case.texts().values())
    for turn in ("first", "again"):  # again: from the prefix cache, its states from a snapshot
        for asked, pixels in case.asks:
            name = asked.id.name
            made.submit(asked, pixels)
            found = run(made)
            assert found.tokens[name] == case.outputs[name], (turn, name)
            case.check(model, name)
            assert_empty(made)
    counters = made.counters()
    assert counters.cached_tokens > 0
    assert counters.spec_draft_tokens > 0
    if right == "none":
        assert counters.spec_accepted_tokens == 0
    if right in ("all", "mixed"):
        assert counters.steps < 2 * (TOKENS * len(case.asks))
        assert counters.spec_accepted_tokens > 0.3 * counters.spec_draft_tokens


@pytest.mark.parametrize("chunk", [7, 64])
def test_drafts_after_a_hand_over(case: Case, chunk: int) -> None:
    """Prefill has no spare slots and drafts nothing; what it hands over is what drafts need, from the first one on."""
    prefill, idle = engine(case.folder, 0, prefill_chunk_tokens=chunk)
    for asked, pixels in case.asks:
        decode, model = engine(case.folder, 2)
        model.right, model.texts = RIGHT["mixed"], list(case.texts().values())
        found = engine_driver.split(prefill, decode, [(asked, pixels)])
        assert found.tokens == {asked.id.name: case.outputs[asked.id.name]}
        case.check(model, asked.id.name)
        assert decode.counters().spec_accepted_tokens > 0
    assert not idle.made


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_drafts_of_several_ranks(case: Case, tp: int, pp: int) -> None:
    watched: dict[int, Watched] = {}

    def watch(model: CausalLM) -> Watched:
        made = watched[model.comm.shard.rank] = Watched(model, RIGHT["mixed"], list(case.texts().values()))
        return made

    def serve(made: Engine) -> None:
        for turn in ("first", "again"):
            for asked, pixels in case.asks:
                name = asked.id.name
                made.submit(asked, pixels)
                assert run(made).tokens[name] == case.outputs[name], (turn, name)
                case.check(watched[(pp - 1) * tp], name)
        assert_empty(made)
        assert made.counters().spec_accepted_tokens > 0

    replica(case.folder, tp, pp, serve, drafts=3, watch=watch)
