"""What the scheduler promises for every stream of requests: budget, order, parked limit, nothing lost and nothing starved."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.block_hash import prompt_keys
from slipstream.engine.block_pool import BlockPool
from slipstream.engine.ledger import OwnerKind
from slipstream.engine.memory import Memory
from slipstream.engine.prefix_cache import PrefixCache
from slipstream.engine.scheduler import LOOK_AHEAD, Scheduler, StepPlan
from slipstream.engine.sequence import GenerationRequest, Sequence, State
from slipstream.engine.state_pool import StatePool
from slipstream.types import FinishReason, RequestId, SamplingParams, StopParams, TokenEvent

STOP = 7


class Copies:
    """A Copier that writes down what it is told."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, int]] = []

    def copy_block(self, source: int, target: int) -> None:
        self.made.append(("block", source, target))

    def copy_state(self, source: int, target: int) -> None:
        self.made.append(("state", source, target))


def scheduler(*, blocks: int = 64, block_size: int = 4, slots: int = 8, max_running: int = 8, budget: int = 32, chunk: int = 0,
              parked_fraction: float = 1.0, growth: int = 1000, snapshots: int = 0, cache: bool = True) -> Scheduler:
    pool = BlockPool(blocks, block_size)
    memory = Memory(pool, StatePool(slots), PrefixCache(pool, StatePool(snapshots, first=slots), enabled=cache), Copies(),
                    growth_tokens=growth)
    return Scheduler(memory, max_running=max_running, max_batch_tokens=budget, chunk_tokens=chunk,
                     parked_fraction=parked_fraction)


def sequence(name: str, prompt: int, outputs: int = 1, *, split: bool = False, ready: bool = False,
             ignore_eos: bool = False, choices: tuple[int, ...] = (0,), output: tuple[int, ...] = (), priority: int = 0,
             tokens: SequenceOf[int] = (), block_size: int = 4) -> Sequence:
    """With a prompt of its own, which is never found in a cache, unless `tokens` are given."""
    request = GenerationRequest(
        id=RequestId(name=name), tokens=tuple(tokens or range(100, 100 + prompt)), sampling=SamplingParams(), choices=choices,
        output=output, priority=priority,
        stop=StopParams(max_tokens=outputs, stop_token_ids=frozenset({STOP}), ignore_eos=ignore_eos))
    keys = prompt_keys(request.tokens + request.output, block_size) if tokens else None
    return Sequence(request=request, split=split, max_outputs=outputs, ready=ready, keys=keys)


def step(of: Scheduler, now: float = 0.0, token: int = 1) -> tuple[StepPlan, list[TokenEvent]]:
    """Plan a step and carry it out; every draw gives `token`."""
    plan = of.plan(now)
    events = []
    for chunk in plan.chunks:
        events += of.advance(chunk, [token] * len(chunk.sequence.choices) if chunk.samples else [], now)
    of.check_integrity()
    return plan, events


def work(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.id.name, chunk.start, chunk.count) for chunk in plan.chunks]


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


# Every stream --------------------------------------------------------------------------------------------------------


class Stream(RuleBasedStateMachine):
    """Any order of arrivals, steps, hand-offs and aborts: budget and ledger hold at every moment, and all of it can end.

    Prompts begin alike, so blocks are shared; requests have several choices, grow, and are preempted.
    """

    @initialize(blocks=st.integers(4, 24), slots=st.sampled_from([0, 3, 6]), budget=st.integers(6, 24),
                chunk=st.sampled_from([0, 1, 5]), fraction=st.sampled_from([0.1, 0.5, 1.0]),
                growth=st.sampled_from([1, 6, 100]), snapshots=st.sampled_from([0, 1, 4]), cache=st.booleans())
    def start(self, blocks: int, slots: int, budget: int, chunk: int, fraction: float, growth: int, snapshots: int,
              cache: bool) -> None:
        self.of = scheduler(blocks=blocks, slots=slots, max_running=6, budget=budget, chunk=chunk, parked_fraction=fraction,
                            growth=growth, snapshots=snapshots if slots and cache else 0, cache=cache)
        self.budget, self.chunk = budget, chunk
        self.names = 0
        self.live: dict[str, Sequence] = {}

    def new(self, prompt: int, outputs: int, split: bool, family: int, choices: int) -> Sequence | None:
        self.names += 1
        made = sequence(f"r{self.names}", 0, outputs, split=split, choices=tuple(range(choices)), priority=family % 2,
                        tokens=[1000 * family + i for i in range(prompt)])
        memory = self.of.memory
        fits = memory.worst(made) <= memory.blocks.total and (memory.slots_of(made) <= memory.slots.total)
        return made if fits else None

    @rule(prompt=st.integers(1, 60), outputs=st.integers(1, 12), split=st.booleans(), family=st.integers(1, 3),
          choices=st.sampled_from([1, 1, 2, 3]))
    def submit(self, prompt: int, outputs: int, split: bool, family: int, choices: int) -> None:
        new = self.new(prompt, outputs, split, family, choices)
        if new is not None:
            self.of.add(new)
            self.live[new.id.name] = new

    @rule(prompt=st.integers(1, 60), outputs=st.integers(2, 12), family=st.integers(1, 3),
          choices=st.sampled_from([1, 1, 2, 3]))
    def reserve(self, prompt: int, outputs: int, family: int, choices: int) -> None:
        new = self.new(prompt, outputs, False, family, choices)
        if new is not None and self.of.reserve(new):
            self.live[new.id.name] = new

    @precondition(lambda self: self.live)
    @rule(data=st.data(), what=st.sampled_from(["ready", "parked", "abort", "commit", "release"]),
          tokens=st.lists(st.sampled_from([1, 1, STOP]), min_size=3, max_size=3))
    def tell(self, data: st.DataObject, what: str, tokens: list[int]) -> None:
        chosen = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if what == "abort" or (what == "release" and chosen.state is State.HANDED_OFF):
            self.of.end_request(chosen.id)
        elif what in ("ready", "parked"):
            chosen.ready = what == "ready"
        elif what == "commit" and chosen.state is State.RESERVED:
            self.of.commit(chosen, tokens[: len(chosen.choices)], 0.0)
        self.forget()

    def forget(self) -> None:
        self.live = {name: one for name, one in self.live.items() if self.of.of(one.id)}

    @rule(token=st.sampled_from([1, 1, 1, STOP]))
    def step(self, token: int) -> None:
        plan, events = step(self.of, token=token)
        assert sum(chunk.count for chunk in plan.chunks) <= self.budget
        assert all(chunk.count <= (self.chunk or self.budget) for chunk in plan.chunks)
        assert len({(chunk.sequence.id, chunk.sequence.choices) for chunk in plan.chunks}) == len(plan.chunks) <= 6
        assert len({(event.request, event.choice) for event in events}) == len(events)
        assert not {event.request for event in events} & set(plan.preempted)
        self.forget()

    @invariant()
    def the_ledger_holds(self) -> None:
        if hasattr(self, "of"):
            self.of.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "of"):
            return
        for chosen in list(self.live.values()):
            chosen.ready = True
            if chosen.state is State.RESERVED:
                self.of.commit(chosen, [1] * len(chosen.choices), 0.0)
        self.forget()
        waits = 0
        while self.live:
            # What has begun may hold memory at its destination already, so its own is kept here (Scheduler._unpromised).
            waiting = sorted(self.of.sequences(State.WAITING), key=lambda one: one.rank)
            promised = {one.id for one in waiting if one.begun}
            before = {(s.id, s.choices, s.computed, s.state) for s in self.of.sequences()}
            plan, _ = step(self.of)
            for chosen in self.of.sequences(State.HANDED_OFF):
                self.of.end(chosen)
            self.forget()
            after = {(s.id, s.choices, s.computed, s.state) for s in self.of.sequences()}
            waits = 0 if before != after else waits + 1
            assert waits < 2, "with every destination ready each step moves something"
            passed = bool(plan.admitted) and waiting[0] not in plan.admitted
            if passed and waiting[0].prompt_tokens <= self.budget // 4:
                assert promised >= {one.id for one in plan.admitted}, "only a promise comes before the first in rank"
        assert self.of.memory.cache.available == self.of.memory.blocks.total
        assert self.of.memory.slots.free == self.of.memory.slots.total


Stream.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStream = Stream.TestCase


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=25),
       st.sampled_from([0.1, 0.25, 1.0]))
def test_split_prompts_all_end_though_destinations_are_slow(prompts: list[tuple[int, int, int]], fraction: float) -> None:
    """(length, steps from begin to ready, steps from hand-off to release): a destination answers only after begin."""
    of = scheduler(blocks=16, block_size=4, slots=6, budget=16, parked_fraction=fraction)
    plans = {f"r{i}": plan for i, plan in enumerate(prompts)}
    for name, (length, _, _) in plans.items():
        of.add(sequence(name, length, split=True))
    begun: dict[str, int] = {}
    handed_off: dict[str, int] = {}
    for now in range(100 * len(prompts)):
        plan, events = step(of)
        begun.update({s.id.name: now for s in plan.begun})
        handed_off.update({event.request.name: now for event in events})
        for s in of.sequences():
            _, ready_after, release_after = plans[s.id.name]
            s.ready = s.id.name in begun and now >= begun[s.id.name] + ready_after
            if s.state is State.HANDED_OFF and s.ready and now >= handed_off[s.id.name] + release_after:
                of.end(s)
        parked = [s for s in of.sequences() if s.parked]
        if len(parked) > 1:
            assert sum(len(s.blocks) for s in parked) <= 16 * fraction
        if not of.sequences():
            break
    assert not of.sequences(), "every prompt ended"
    assert of.memory.cache.available == of.memory.blocks.total
