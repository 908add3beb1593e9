"""What decode has cached of a conversation, answer and states included, goes to prefill's cache: tokens stay the same, only
what is new is computed, and nothing is left behind. On the toy model every wrong row or state shows in the tokens."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.caches import states_of
from slipstream.engine.engine import Engine, GenerationRequest
from slipstream.engine.ledger import OwnerKind
from slipstream.errors import InternalError, InvalidRequestError, ProtocolError
from slipstream.types import RequestId
from tests.contract.test_engine_reuse import Talk, converse
from tests.support import mtp, tiny
from tests.support.drafting import RIGHT
from tests.support.drafting import engine as drafting_engine
from tests.support.engine_driver import assert_empty, poison, request
from tests.support.engine_pair import Pair
from tests.support.loading import load
from tests.support.toy_engine import make, text


def pair(*, hybrid: bool = True, blocks: int = 200, snapshots: int = 6, **config: Any) -> tuple[Pair, Engine]:
    """And its decode engine, which keeps snapshots too."""
    engines = []
    for _ in range(2):
        engine, _ = make(hybrid=hybrid, kv_cache_tokens=4 * blocks, state_snapshots=snapshots, max_context=400, **config)
        poison(engine)
        engines.append(engine)
    return Pair(engines[0], engines[1]), engines[1]


def first_turn(of: Pair, *, hybrid: bool = True, count: int = 22) -> Talk:
    """Computed and decoded; the conversation with its answer and what is said next."""
    talk = Talk(hybrid)
    talk.say(text(1, 9))
    talk.show(2)
    talk.say(text(2, 6))
    of.submit(talk.request("first", count), talk.pixels)
    of.run()
    talk.say(talk.expected(count))
    talk.say(text(3, 9))
    return talk


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "dense"])
def test_the_next_turn_computes_only_what_is_new(hybrid: bool) -> None:
    of, decode = pair(hybrid=hybrid)
    talk = first_turn(of, hybrid=hybrid)
    known = len(talk.tokens) - 9 - 1  # the last token of the answer was never fed back
    assert load(decode, of.prefill, talk.request("second", 7)) == known // 4 * 4
    assert_empty(of.prefill)
    assert_empty(decode)
    before = of.prefill.counters()
    of.submit(talk.request("second", 7), talk.pixels)
    of.run()
    assert of.tokens["second", 0] == talk.expected(7)
    after = of.prefill.counters()
    assert after.cached_tokens - before.cached_tokens == known // 4 * 4
    assert after.step_tokens - before.step_tokens == len(talk.tokens) - known // 4 * 4
    assert of.prefill._runner._model.encoded == 1, "pictures of loaded blocks are not encoded again"  # type: ignore[attr-defined]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), hybrid=st.booleans(), blocks=st.sampled_from([60, 90, 400]),
       snapshots=st.sampled_from([1, 2, 6]), growth=st.sampled_from([1, 8, 256]))
def test_random_conversations_get_the_same_tokens_with_loads(seed: int, hybrid: bool, blocks: int, snapshots: int,
                                                             growth: int) -> None:
    """Loads between steps, of prompts that run, of others, with eviction and preemption on both sides."""
    of, decode = pair(hybrid=hybrid, blocks=blocks, snapshots=snapshots, growth_tokens=growth, max_batch_tokens=24)
    converse(of, random.Random(seed), Talk(hybrid), lambda asked: load(decode, of.prefill, asked))


def test_of_an_answer_the_latest_snapshot_is_kept() -> None:
    of, decode = pair(snapshots=6)
    talk = first_turn(of, count=40)
    changes = decode.cache_changes()
    assert changes is not None
    assert sorted(changes.levels.values())[-2:] == [1, 2], "one snapshot, at the last block"
    assert load(decode, of.prefill, talk.request("second", 7)) == (len(talk.tokens) - 10) // 4 * 4


def test_without_snapshots_a_hybrid_lends_nothing() -> None:
    of, decode = pair(snapshots=0)
    talk = first_turn(of)
    assert load(decode, of.prefill, talk.request("second", 7)) == 0


@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "dense"])
def test_what_is_lent_cannot_be_evicted_and_belongs_to_a_transfer(hybrid: bool) -> None:
    of, decode = pair(hybrid=hybrid, blocks=40, snapshots=1)
    talk = first_turn(of, hybrid=hybrid)
    asked = dataclasses.replace(talk.request("second", 7), id=RequestId(name="lent"))
    lent = decode.lend(asked)
    assert lent is not None
    decode.check_integrity()
    owners = {owner.kind: held for owner, held in decode.holdings().items() if owner is not None}
    assert owners.get(OwnerKind.TRANSFER, (0, 0)) == (0, 1 if hybrid else 0), "the state is a copy; blocks are the cache's"
    with pytest.raises(InvalidRequestError):
        decode.lend(asked)
    other = request("other", text(9, 4 * (40 - len(lent.blocks) - 8)), 30)
    decode.submit(other)
    while decode.has_work and not decode.step().stalled:
        decode.check_integrity()
    landing = of.prefill.borrow(asked, lent.have_tokens)
    assert landing is not None
    assert decode.abort(asked.id)
    assert of.prefill.abort(asked.id), "given up: nothing of it is found"
    assert_empty(of.prefill)
    decode.submit(request("whole", text(8, 4 * 39), 2))
    while decode.has_work and not decode.step().stalled:
        decode.check_integrity()
    assert decode.lend(asked) is None, "it was evicted once it was given back"
    assert_empty(decode)


def test_lending_takes_nothing_that_running_sequences_may_need() -> None:
    of, decode = pair(hybrid=False, blocks=24, growth_tokens=1)
    talk = first_turn(of, hybrid=False)
    asked = talk.request("second", 7)
    decode.submit(request("grows", text(7, 30), 60, ignore_eos=True))
    while decode.load().free_blocks > 13:  # as many as are cached of it
        decode.step()
    assert decode.lend(asked) is None
    assert not [error for _, error in decode.step().failures]
    decode.abort(RequestId(name="grows"))


def test_a_full_prefill_borrows_nothing_and_wrong_offers_are_refused() -> None:
    of, decode = pair(hybrid=False, blocks=60)
    talk = first_turn(of, hybrid=False)
    asked = talk.request("second", 7)
    for tokens in (0, 3, 4 * len(asked.tokens)):
        with pytest.raises(ProtocolError):
            of.prefill.borrow(asked, tokens)
    blocker = request("blocker", text(9, 4 * 57))
    assert of.prefill.reserve(blocker) is not None
    assert load(decode, of.prefill, asked) == 0
    of.prefill.abort(blocker.id)
    assert load(decode, of.prefill, asked) > 0
    with pytest.raises(InternalError):
        of.prefill.keep(asked.id)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp.add_easy(tiny.write("qwen3_5_text", tmp_path_factory.mktemp("easy"), seed=1))


def snapshot(engine: Engine, asked: GenerationRequest) -> list[torch.Tensor]:
    """All states that are lent."""
    lent = engine.lend(asked)
    assert lent is not None
    found = [state[lent.state_slot].clone() for cache in engine.caches for state in states_of(cache).values()]
    engine.abort(asked.id)
    return found


@pytest.mark.parametrize("length", [20, 21, 22, 23])
@pytest.mark.parametrize("right", ["none", "all", "mixed"])
def test_drafts_leave_the_same_snapshots(folder: Path, right: str, length: int) -> None:
    """Wherever in a step the end of a block lies, and whatever drafts are right."""
    turns, states = list[list[int]](), list[list[torch.Tensor]]()
    for drafts in (0, 3):
        prefill, _ = drafting_engine(folder, 0)
        decode, model = drafting_engine(folder, drafts)
        of, tokens = Pair(prefill, decode), [random.Random(4).randrange(490) for _ in range(length)]
        if drafts:
            model.right, model.texts = RIGHT[right], [tokens + turns[0]]
        of.submit(request("first", tokens, 45, ignore_eos=True), ())
        of.run()
        turn = tokens + of.tokens["first", 0] + [5, 6, 7]
        states.append(snapshot(decode, request("state", turn, 9)))
        assert load(decode, prefill, request("second", turn, 9)) == 64
        before = prefill.counters().cached_tokens
        of.submit(request("second", turn, 9, ignore_eos=True), ())
        of.run()
        assert prefill.counters().cached_tokens - before == 64
        turns.append(of.tokens["first", 0] + of.tokens["second", 0])
        for engine in of.engines():
            assert_empty(engine)
    assert turns[0] == turns[1]
    for ours, theirs in zip(*states, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
