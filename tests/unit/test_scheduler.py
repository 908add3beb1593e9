"""What the scheduler promises for every stream of requests: budget, order, parked limit, nothing lost and nothing starved."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.engine.block_pool import BlockPool
from slipstream.engine.ledger import OwnerKind
from slipstream.engine.scheduler import LOOK_AHEAD, Scheduler, StepPlan
from slipstream.engine.sequence import GenerationRequest, Sequence, State
from slipstream.engine.state_pool import StatePool
from slipstream.types import FinishReason, RequestId, SamplingParams, StopParams, TokenEvent

STOP = 7


def scheduler(*, blocks: int = 64, block_size: int = 4, slots: int = 8, max_running: int = 8, budget: int = 32, chunk: int = 0,
              parked_fraction: float = 1.0) -> Scheduler:
    return Scheduler(blocks=BlockPool(blocks, block_size), slots=StatePool(slots), max_running=max_running,
                     max_batch_tokens=budget, chunk_tokens=chunk, parked_fraction=parked_fraction)


def sequence(name: str, prompt: int, outputs: int = 1, *, split: bool = False, ready: bool = False,
             ignore_eos: bool = False) -> Sequence:
    request = GenerationRequest(
        id=RequestId(name=name), tokens=tuple(range(100, 100 + prompt)), sampling=SamplingParams(),
        stop=StopParams(max_tokens=outputs, stop_token_ids=frozenset({STOP}), ignore_eos=ignore_eos))
    return Sequence(request=request, split=split, max_outputs=outputs, ready=ready)


def step(of: Scheduler, now: float = 0.0, token: int = 1) -> tuple[StepPlan, list[TokenEvent]]:
    """Plan a step and carry it out; every draw gives `token`."""
    plan = of.plan(now)
    events = [of.advance(chunk, token if chunk.samples else None, now) for chunk in plan.chunks]
    of.check_integrity()
    return plan, [event for event in events if event is not None]


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
    assert work(step(of)[0]) == [("a", 4, 1), ("b", 6, 1), ("c", 3, 8)]


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
    assert of.blocks.free == 64 - 9


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
    assert of.slots.free == 0


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
        assert of.blocks.free == of.blocks.total


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
    assert {owner.kind for owner in of.blocks.owned().values()} == {OwnerKind.TRANSFER}
    assert not of.has_work
    of.end(prompt)
    assert of.blocks.free == of.blocks.total


# Reservations --------------------------------------------------------------------------------------------------------


def test_a_reservation_owns_prompt_and_growth() -> None:
    of = scheduler(blocks=10, block_size=4)
    reserved = sequence("a", 10, 20)
    assert of.reserve(reserved)
    assert len(reserved.blocks) == 8  # 10 + 19 rows
    assert {owner.kind for owner in of.blocks.owned().values()} == {OwnerKind.RESERVATION}
    assert not of.reserve(sequence("b", 10, 20))
    assert not of.has_work
    of.commit(reserved, 3, now=1.0)
    events: list[TokenEvent] = []
    while of.has_work:
        plan, new = step(of)
        assert [chunk.tokens for chunk in plan.chunks] in ([(3,)], [(1,)])
        events += new
    assert [event.index for event in events] == list(range(1, 20))
    assert of.blocks.free == of.blocks.total


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


# Every stream --------------------------------------------------------------------------------------------------------


class Stream(RuleBasedStateMachine):
    """Any order of arrivals, steps, hand-offs and aborts: budget and ledger hold at every moment, and all of it can end."""

    @initialize(blocks=st.integers(4, 24), slots=st.sampled_from([0, 3, 6]), budget=st.integers(6, 24),
                chunk=st.sampled_from([0, 1, 5]), fraction=st.sampled_from([0.1, 0.5, 1.0]))
    def start(self, blocks: int, slots: int, budget: int, chunk: int, fraction: float) -> None:
        self.of = scheduler(blocks=blocks, slots=slots, max_running=6, budget=budget, chunk=chunk, parked_fraction=fraction)
        self.budget, self.chunk = budget, chunk
        self.names = 0
        self.live: dict[str, Sequence] = {}
        self.tokens: dict[str, int] = {}

    def new(self, prompt: int, outputs: int, split: bool) -> Sequence:
        rows = self.of.blocks.total * 4
        self.names += 1
        outputs = min(outputs, rows)
        return sequence(f"r{self.names}", min(prompt, rows + 1 - outputs), outputs, split=split)

    @rule(prompt=st.integers(1, 60), outputs=st.integers(1, 12), split=st.booleans())
    def submit(self, prompt: int, outputs: int, split: bool) -> None:
        new = self.new(prompt, outputs, split)
        self.of.add(new)
        self.live[new.id.name] = new

    @rule(prompt=st.integers(1, 60), outputs=st.integers(2, 12))
    def reserve(self, prompt: int, outputs: int) -> None:
        new = self.new(prompt, outputs, False)
        if self.of.reserve(new):
            self.live[new.id.name] = new

    @precondition(lambda self: self.live)
    @rule(data=st.data(), what=st.sampled_from(["ready", "parked", "abort", "commit", "release"]))
    def tell(self, data: st.DataObject, what: str) -> None:
        chosen = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if what == "abort" or (what == "release" and chosen.state is State.HANDED_OFF):
            self.of.end(chosen)
            del self.live[chosen.id.name]
        elif what in ("ready", "parked"):
            chosen.ready = what == "ready"
        elif what == "commit" and chosen.state is State.RESERVED:
            self.of.commit(chosen, 1, 0.0)

    @rule(token=st.sampled_from([1, 1, 1, STOP]))
    def step(self, token: int) -> None:
        decoding = self.of.count(State.DECODING)
        plan, events = step(self.of, token=token)
        assert sum(chunk.count for chunk in plan.chunks) <= self.budget
        assert sum(chunk.count == 1 and chunk.start >= chunk.sequence.prompt_tokens for chunk in plan.chunks) == decoding
        assert all(chunk.count <= (self.chunk or self.budget) for chunk in plan.chunks)
        assert len({chunk.sequence.id for chunk in plan.chunks}) == len(plan.chunks) <= 6
        for name in [event.request.name for event in events if event.finish is not None]:
            if not self.live[name].split:
                del self.live[name]

    @invariant()
    def the_ledger_holds(self) -> None:
        if not hasattr(self, "of"):
            return
        self.of.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "of"):
            return
        for chosen in list(self.live.values()):
            chosen.ready = True
            if chosen.state is State.RESERVED:
                self.of.commit(chosen, 1, 0.0)
        waits = 0
        while self.live:
            oldest = next(iter(self.of.sequences(State.WAITING)), None)
            # What has begun may hold memory at its destination already, so its own is kept here (Scheduler._unpromised).
            promised = {waiting.id for waiting in self.of.sequences(State.WAITING) if waiting.begun}
            before = {s.id.name: (s.computed, s.state) for s in self.live.values()}
            plan, events = step(self.of)
            for event in events:
                if event.finish is not None and not self.live[event.request.name].split:
                    del self.live[event.request.name]
            for chosen in self.of.sequences(State.HANDED_OFF):
                self.of.end(chosen)
                del self.live[chosen.id.name]
            after = {s.id.name: (s.computed, s.state) for s in self.live.values()}
            waits = 0 if before != after else waits + 1
            assert waits < 2, "with every destination ready each step moves something"
            overtakes = oldest is not None and bool(plan.admitted) and oldest not in plan.admitted
            assert not overtakes or promised >= {one.id for one in plan.admitted}, "only a promise comes before the oldest"
        assert self.of.blocks.free == self.of.blocks.total
        assert self.of.slots.free == self.of.slots.total


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
    assert of.blocks.free == of.blocks.total
