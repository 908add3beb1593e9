"""What the scheduler decides: budget, order, memory, parked limit, growth and preemption, choices, cached prompts."""

from __future__ import annotations

from slipstream.engine.ledger import OwnerKind
from slipstream.engine.scheduler import LOOK_AHEAD
from slipstream.engine.sequence import State
from slipstream.types import FinishReason, RequestId, TokenEvent
from tests.support.scheduling import STOP, Copies, scheduler, sequence, step, work

# One step ------------------------------------------------------------------------------------------------------------


def test_decode_comes_first_then_prompts_in_order_of_arrival() -> None:
    of = scheduler(budget=10)
    of.add(sequence("a", 3, 5))
    step(of)
    of.add(sequence("b", 6, 5))
    of.add(sequence("c", 20, 5))
    assert work(step(of)[0]) == [("a", 3, 1), ("b", 0, 6), ("c", 0, 3)]
    assert work(step(of)[0]) == [("a", 4, 1), ("b", 6, 1), ("c", 3, 5)], "a chunk that leaves some ends with a block"


def test_the_chunk_limit_leaves_budget_to_the_next_prompt() -> None:
    of = scheduler(budget=10, chunk=4)
    for name in "abc":
        of.add(sequence(name, 6))
    assert work(step(of)[0]) == [("a", 0, 4), ("b", 0, 4), ("c", 0, 2)]
    assert work(step(of)[0]) == [("a", 4, 2), ("b", 4, 2), ("c", 2, 4)]


def test_a_prompt_owns_all_its_blocks_when_it_is_admitted() -> None:
    of = scheduler(budget=8, block_size=4)
    of.add(sequence("a", 30, 4))
    plan, _ = step(of)
    assert [len(s.blocks) for s in plan.admitted] == [9]  # 30 prompt tokens and 3 fed back; the 4th is never fed back
    assert of.memory.cache.available == 64 - 9


def test_a_prompt_that_waits_for_memory_is_not_overtaken() -> None:
    of = scheduler(blocks=8, block_size=4, budget=64)
    of.add(sequence("a", 20, 4))
    step(of)
    of.add(sequence("big", 24, 1))
    of.add(sequence("small", 4, 1))
    order: list[str] = []
    while of.has_work:
        order += [s.id.name for s in step(of)[0].admitted]
    assert order == ["big", "small"]


def test_slots_limit_admission() -> None:
    of = scheduler(slots=2, max_running=8)
    for name in "abc":
        of.add(sequence(name, 4, 3))
    assert [s.id.name for s in step(of)[0].admitted] == ["a", "b"]
    assert of.memory.slots.free == 0


def test_max_running_limits_a_model_without_slots() -> None:
    of = scheduler(slots=0, max_running=2)
    for name in "abc":
        of.add(sequence(name, 4, 3))
    plan, _ = step(of)
    assert [(s.id.name, s.state_slot) for s in plan.admitted] == [("a", None), ("b", None)]


# The end of a sequence -----------------------------------------------------------------------------------------------


def test_max_tokens_counts_the_first_token() -> None:
    for outputs in (1, 2, 16):
        of = scheduler()
        of.add(sequence("a", 5, outputs))
        events: list[TokenEvent] = []
        while of.has_work:
            events += step(of)[1]
        assert [event.index for event in events] == list(range(outputs))
        assert [event.finish for event in events] == [None] * (outputs - 1) + [FinishReason.LENGTH]
        assert of.memory.cache.available == of.memory.blocks.total


def test_a_stop_token_ends_even_as_the_first_and_unless_ignored() -> None:
    of = scheduler()
    of.add(sequence("a", 5, 4))
    of.add(sequence("b", 5, 4, ignore_eos=True))
    _, events = step(of, token=STOP)
    assert [(event.request.name, event.finish) for event in events] == [("a", FinishReason.STOP), ("b", None)]
    assert of.count(State.DECODING) == 1


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    of = scheduler()
    of.add(sequence("a", 5, 1))
    assert step(of, token=STOP)[1][0].finish is FinishReason.STOP


def test_a_split_prompt_keeps_its_memory_for_the_transfer() -> None:
    of = scheduler()
    prompt = sequence("a", 5, 4, split=True)
    of.add(prompt)
    step(of, token=STOP)
    assert prompt.state is State.HANDED_OFF
    assert {owner.kind for owner in of.memory.blocks.owned().values()} == {OwnerKind.TRANSFER}
    assert not of.has_work
    of.end(prompt)
    assert of.memory.cache.available == of.memory.blocks.total


# Reservations --------------------------------------------------------------------------------------------------------


def test_a_reservation_owns_prompt_and_growth() -> None:
    of = scheduler(blocks=10, block_size=4)
    reserved = sequence("a", 10, 20)
    assert of.reserve(reserved)
    assert len(reserved.blocks) == 8  # 10 + 19 rows
    assert {owner.kind for owner in of.memory.blocks.owned().values()} == {OwnerKind.RESERVATION}
    assert not of.reserve(sequence("b", 10, 20))
    assert not of.has_work
    of.commit(reserved, [3], now=1.0)
    events: list[TokenEvent] = []
    while of.has_work:
        plan, new = step(of)
        assert [chunk.tokens for chunk in plan.chunks] in ([(3,)], [(1,)])
        events += new
    assert [event.index for event in events] == list(range(1, 20))
    assert of.memory.cache.available == of.memory.blocks.total


def test_max_running_limits_reservations_of_a_model_without_slots() -> None:
    of = scheduler(slots=0, max_running=2)
    assert [of.reserve(sequence(f"r{i}", 4, 2)) for i in range(3)] == [True, True, False]
    of.add(sequence("prompt", 4))
    assert not step(of)[0].chunks


# Parked memory -------------------------------------------------------------------------------------------------------


def test_a_prompt_is_begun_early_only_if_memory_is_left_for_it() -> None:
    """What has begun may hold memory at its destination: if it had to wait here for a parked prompt, and that one there for
    that memory, neither would ever go on."""
    of = scheduler(blocks=64, block_size=4, budget=400, parked_fraction=0.25)
    parked, large, small = (sequence(name, 4 * blocks, split=True) for name, blocks in (("a", 13), ("b", 52), ("c", 10)))
    for one in (parked, large, small):
        of.add(one)
    plan, _ = step(of)
    assert [s.id.name for s in plan.begun] == ["a", "c"]
    small.ready = True
    assert [s.id.name for s in step(of)[0].admitted] == ["c"]
    of.end(small)
    assert not step(of)[0].begun
    parked.ready = True
    of.end(parked)
    plan, _ = step(of)
    assert [s.id.name for s in plan.begun] == ["b"] == [s.id.name for s in plan.admitted]


def test_over_the_parked_limit_only_ready_prompts_start_and_others_are_begun() -> None:
    of = scheduler(blocks=40, block_size=4, parked_fraction=0.25, slots=0, budget=100, max_running=50)
    prompts = [sequence(f"p{i}", 16, split=True) for i in range(4 + LOOK_AHEAD)]
    for prompt in prompts:
        of.add(prompt)
    plan, _ = step(of)
    assert [s.id.name for s in plan.admitted] == ["p0", "p1"]  # 8 of the 10 blocks
    assert [s.id.name for s in plan.begun] == [f"p{i}" for i in range(2 + LOOK_AHEAD)]
    assert not step(of)[0].chunks
    prompts[5].ready = True
    assert [s.id.name for s in step(of)[0].admitted] == ["p5"]
    prompts[0].ready = True  # no longer parked: the oldest waiting one is next
    assert [s.id.name for s in step(of)[0].admitted] == ["p2"]
    prompts[2].ready, prompts[0].ready = True, False  # lost again
    assert not step(of)[0].admitted


def test_a_prompt_larger_than_the_parked_limit_starts_when_nothing_is_parked() -> None:
    of = scheduler(blocks=40, block_size=4, parked_fraction=0.25, budget=200)
    small, large = sequence("small", 4, split=True), sequence("large", 100, split=True)
    of.add(small)
    step(of)
    of.add(large)
    assert not step(of)[0].admitted
    of.end(small)
    assert [s.id.name for s in step(of)[0].admitted] == ["large"]


def test_parked_prompts_do_not_take_every_slot() -> None:
    of = scheduler(slots=8, parked_fraction=0.25, budget=100)
    prompts = [sequence(f"p{i}", 2, split=True) for i in range(8)]
    for prompt in prompts:
        of.add(prompt)
    assert [s.id.name for s in step(of)[0].admitted] == ["p0", "p1"]
    prompts[7].ready = True
    assert [s.id.name for s in step(of)[0].admitted] == ["p7"]


# Growth and preemption -----------------------------------------------------------------------------------------------


def test_a_sequence_starts_with_some_growth_and_takes_blocks_as_it_goes() -> None:
    of = scheduler(block_size=4, growth=4)
    one = sequence("a", 8, 20)
    of.add(one)
    step(of)
    assert len(one.blocks) == 3
    for _ in range(5):
        step(of)
    assert len(one.blocks) == 4


def test_the_last_in_rank_is_preempted_for_those_before_it() -> None:
    of = scheduler(blocks=10, block_size=4, growth=1)
    for name, priority in (("old", 0), ("urgent", -1), ("young", 0)):
        of.add(sequence(name, 8, 17, priority=priority))
    preempted: list[tuple[int, str]] = []
    for number in range(40):
        preempted += [(number, id.name) for id in step(of)[0].preempted]
        if not of.has_work:
            break
    assert [name for _, name in preempted] == ["young", "old"]
    assert of.memory.cache.available == 10


def test_a_resumed_request_is_not_the_first_to_be_preempted_again() -> None:
    of = scheduler(blocks=6, block_size=4, growth=1, budget=64)
    of.add(sequence("new", 8, 9))
    of.add(sequence("resumed", 4, 13, output=(1, 1, 1, 1)))
    gone = [id.name for _ in range(20) for id in step(of)[0].preempted]
    assert gone == ["new"]


def test_preemption_takes_every_choice_of_a_request() -> None:
    of = scheduler(blocks=8, block_size=4, growth=1)
    of.add(sequence("first", 8, 17))
    of.add(sequence("three", 8, 17, choices=(0, 1, 2)))
    while not (gone := step(of)[0].preempted):
        pass
    assert [id.name for id in gone] == ["three"]
    assert [one.id.name for one in of.sequences()] == ["first"]


def test_newcomers_leave_a_block_for_each_sequence_that_grows() -> None:
    of = scheduler(blocks=8, block_size=4, growth=1)
    assert of.reserve(sequence("a", 8, 17))
    assert not of.reserve(sequence("b", 16, 2)), "3 blocks are held, 5 needed, and one kept"
    assert of.reserve(sequence("c", 12, 2))


# Several choices -----------------------------------------------------------------------------------------------------


def test_choices_share_the_whole_blocks_of_the_prompt_and_copy_the_rest() -> None:
    of = scheduler(block_size=4, growth=2)
    of.add(sequence("a", 10, 3, choices=(0, 2, 5)))
    _, events = step(of)
    assert [(event.choice, event.index) for event in events] == [(0, 0), (2, 0), (5, 0)]
    first, *others = of.of(RequestId(name="a"))
    for other in others:
        assert other.blocks[:2] == first.blocks[:2]
        assert not set(other.blocks[2:]) & set(first.blocks[2:])
    assert len(of.memory.blocks.owned()) == 2 + 3 * 1
    copier = of.memory._copier
    assert isinstance(copier, Copies)
    assert copier.made == [copy for other in others for copy in (("block", first.blocks[2], other.blocks[2]),
                                                                 ("state", first.state_slot, other.state_slot))]
    _, events = step(of)
    assert sorted(event.choice for event in events) == [0, 2, 5]


def test_a_choice_that_ends_at_once_leaves_the_others() -> None:
    of = scheduler(block_size=4)
    reserved = sequence("a", 6, 9, choices=(0, 1, 2))
    assert of.reserve(reserved)
    of.commit(reserved, [STOP, 1, STOP], 0.0)
    of.check_integrity()
    assert [one.choices for one in of.of(RequestId(name="a"))] == [(1,)]
    while of.has_work:
        step(of)
    assert of.memory.cache.available == 64


def test_a_split_prompt_draws_every_choice_and_holds_its_blocks_once() -> None:
    of = scheduler(block_size=4)
    prompt = sequence("a", 10, 9, split=True, choices=(0, 1, 2))
    of.add(prompt)
    _, events = step(of)
    assert [event.choice for event in events] == [0, 1, 2]
    assert prompt.state is State.HANDED_OFF
    assert len(of.memory.blocks.owned()) == 3


# Order ---------------------------------------------------------------------------------------------------------------


def test_priority_then_resumed_then_arrival() -> None:
    of = scheduler(budget=8, max_running=8)
    for name, priority, output in (("late", 5, ()), ("b", 0, ()), ("resumed", 0, (1,)), ("urgent", -3, ()), ("c", 0, ())):
        of.add(sequence(name, 8 - len(output), 4, split=True, ready=True, priority=priority, output=output))
    order: list[str] = []
    while of.has_work:
        order += [s.id.name for s in step(of)[0].admitted]
    assert order == ["urgent", "resumed", "b", "c", "late"]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    of = scheduler(blocks=200, block_size=4, budget=32, max_running=8)
    of.add(sequence("long", 400, split=True))
    step(of)
    of.add(sequence("short", 6, split=True))
    assert work(step(of)[0]) == [("long", 32, 24), ("short", 0, 6)]
    assert work(step(of)[0]) == [("long", 56, 32)], "nobody is short: all of it for the long one"


# Cached prompts ------------------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_where_they_part() -> None:
    of = scheduler(block_size=4, slots=0, budget=64)
    of.add(sequence("a", 0, tokens=range(100, 118), split=True))
    step(of)
    of.add(sequence("b", 0, tokens=[*range(100, 112), *range(200, 206)], split=True))
    assert work(step(of)[0]) == [("b", 12, 6)]
    of.add(sequence("again", 0, tokens=range(100, 116), split=True))
    assert work(step(of)[0]) == [("again", 12, 4)], "one token at least has to be computed"


def test_a_hybrid_prompt_needs_a_snapshot_and_leaves_one_where_it_would_have_helped() -> None:
    of = scheduler(block_size=4, slots=4, budget=64, snapshots=8)
    for name in "ab":
        of.add(sequence(name, 0, tokens=[*range(100, 112), *range(ord(name) * 10, ord(name) * 10 + 7)], split=True))
        plan, _ = step(of)
        of.end_request(plan.chunks[0].sequence.id)
        expected = [16] if name == "a" else [12, 16]
        assert [length for length, _ in plan.chunks[0].snapshots] == expected
        assert plan.chunks[0].start == 0, "the first one left no snapshot where the second one parts"
    of.add(sequence("c", 0, tokens=[*range(100, 112), *range(500, 507)], split=True))
    assert work(step(of)[0]) == [("c", 12, 7)]


def test_what_never_arrived_or_failed_is_not_found() -> None:
    """A prompt whose transfer or whose step failed leaves only what was whole before that (KV-07)."""
    of = scheduler(block_size=4, slots=0, budget=8)
    lost = sequence("lost", 0, 4, tokens=range(100, 116))
    assert of.reserve(lost)
    of.end(lost)
    failing = sequence("failing", 0, tokens=range(100, 116), split=True)
    of.add(failing)
    step(of)
    (chunk,) = of.plan(0.0).chunks
    of.discard(chunk)
    of.end(failing)
    again = sequence("again", 0, 4, tokens=range(100, 116))
    assert of.reserve(again)
    assert again.cached == 8, "the first chunk was computed"
    of.end(again)
    of.check_integrity()
