"""Drafts in the schedule: never anybody else's tokens, rows, blocks or slots, and any number of them may be right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.scheduler import Scheduler, StepPlan
from slipstream.engine.sequence import Sequence, State
from slipstream.types import FinishReason
from tests.support.scheduling import STOP, scheduler, sequence, step, work

NEXT = (11, 12, 13)


def verify(of: Scheduler, plan: StepPlan, right: int, token: int = 1) -> list[tuple[str, int]]:
    """Carry a plan out: of each chunk's drafts so many are right, and new ones come."""
    found = []
    for chunk in plan.chunks:
        decodes = chunk.start >= chunk.sequence.prompt_tokens
        tokens = [*chunk.drafts[:right], token] if decodes else [token] * len(chunk.sequence.choices) if chunk.samples else []
        drafts = NEXT[: max(0, min(of.memory.draft_tokens, (chunk.room or 0) - len(tokens) + 1))] if decodes else ()
        found += [(event.request.name, event.token) for event in of.advance(chunk, tokens, 0.0, drafts)]
    of.check_integrity()
    return found


def decoding(of: Scheduler, name: str = "a", prompt: int = 5, outputs: int = 20) -> Sequence:
    """Whose drafts are to be verified next."""
    of.add(made := sequence(name, prompt, outputs))
    step(of)
    verify(of, of.plan(0.0), 0)
    return made


def test_drafts_follow_the_last_token_and_take_a_slot_each() -> None:
    of = scheduler(slots=8, drafts=3)
    one = decoding(of)
    assert (one.drafts, len(one.slots), of.memory.slots.free) == (NEXT, 4, 4)
    before = one.slots
    plan = of.plan(0.0)
    assert work(plan) == [("a", 6, 4)]
    assert plan.chunks[0].tokens == (1, *NEXT)
    assert verify(of, plan, 2) == [("a", 11), ("a", 12), ("a", 1)]
    assert (one.computed, one.state_slot, sorted(one.slots)) == (9, before[2], sorted(before))
    assert one.outputs[-3:] == [11, 12, 1]


def test_nothing_after_a_stop_counts() -> None:
    of = scheduler(slots=8, drafts=3)
    decoding(of).drafts = (11, STOP, 12)
    events = of.advance(of.plan(0.0).chunks[0], [11, STOP, 12, 1], 0.0, NEXT)
    assert [(event.token, event.finish) for event in events] == [(11, None), (STOP, FinishReason.STOP)]
    assert of.memory.slots.free == of.memory.slots.total
    of.check_integrity()


def test_prompts_take_their_tokens_first() -> None:
    """A decoding sequence always has its one; drafts have what prompts leave."""
    of = scheduler(budget=9, slots=12, drafts=3)
    decoding(of)
    of.add(sequence("long", 60, 1))
    assert work(of.plan(0.0)) == [("a", 6, 1), ("long", 0, 8)]
    of = scheduler(budget=8, slots=12, drafts=3)
    decoding(of)
    of.add(sequence("short", 5, 1))
    assert work(of.plan(0.0)) == [("a", 6, 3), ("short", 0, 5)]


def test_rows_that_are_left_bound_the_drafts() -> None:
    of = scheduler(slots=8, drafts=3)
    one = decoding(of, outputs=4)  # rows 0 to 7; 5 and 6 are in the caches after the next step
    assert one.rows == 8
    assert work(of.plan(0.0)) == [("a", 6, 2)]


def test_a_split_prompt_has_no_spare_slots_and_choices_have_their_own() -> None:
    of = scheduler(slots=9, drafts=2)
    prompt = sequence("p", 5, 4, split=True)
    of.add(prompt)
    assert of.reserve(sequence("r", 5, 9, choices=(0, 1)))
    step(of)
    assert (prompt.state, len(prompt.slots)) == (State.HANDED_OFF, 1)
    assert of.memory.slots.free == 9 - 1 - 2 * 3
    assert not of.reserve(sequence("full", 5, 9))


def test_without_a_free_block_drafts_wait_and_nobody_is_preempted() -> None:
    of = scheduler(blocks=5, block_size=2, slots=12, drafts=3, growth=1)
    decoding(of, "a", 3, 12)
    decoding(of, "b", 3, 4)
    for _ in range(40):
        plan = of.plan(0.0)
        if len(of.sequences(State.DECODING)) == 2:
            assert not plan.preempted or of.memory.cache.available == 0
        verify(of, plan, 0)
        if not of.has_work:
            break
    assert not of.has_work


ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14), st.integers(1, 14), st.integers(1, 2)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(1, 3), st.integers(4, 40), st.sampled_from([1, 2, 4]))
def test_any_number_of_right_drafts_keeps_the_ledgers(actions: list[tuple[int, int, int, int]], drafts: int, blocks: int,
                                                      size: int) -> None:
    """Every owned slot and block is in the ledger after every step (check_integrity), and each request ends or is preempted."""
    of = scheduler(blocks=blocks, block_size=size, slots=6 * (1 + drafts), max_running=6, budget=12, growth=2, drafts=drafts)
    told: dict[str, int] = {}
    for number, (right, prompt, outputs, choices) in enumerate(actions):
        one = sequence(f"r{number}", prompt, outputs, tokens=range(200, 200 + prompt), choices=tuple(range(choices)),
                       block_size=size)
        if of.memory.worst(one) <= blocks:
            of.add(one)
        for name, _ in verify(of, of.plan(0.0), right):
            told[name] = told.get(name, 0) + 1
    for _ in range(2000):
        if not of.has_work:
            break
        verify(of, of.plan(0.0), 1)
    assert not of.has_work
    assert of.memory.slots.free == of.memory.slots.total
    limits = {f"r{number}": outputs * choices for number, (_, _, outputs, choices) in enumerate(actions)}
    assert all(count <= limits[name] for name, count in told.items())
