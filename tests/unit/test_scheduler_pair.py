"""A prefill and a decode scheduler with too little memory for what they are asked: everything ends, whatever waits for what."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.admission import Admission, Need
from slipstream.engine.sequence import GenerationRequest, Sequence, State
from slipstream.types import EngineLoad, RequestId, SamplingParams, StopParams
from tests.support.scheduling import scheduler, step

DECODE_BLOCKS, DECODE_RUNNING = 16, 4


@dataclass(kw_only=True)
class Asked:
    """A request and where its two legs are."""

    request: GenerationRequest
    ask_at: int | None = None
    """When its destination is asked for room (again); None: it is not known to have begun, or there is room already."""
    there: Sequence | None = None
    outputs: list[int] = field(default_factory=list)


class Deployment:
    """Does what workers and router do, step by step, with schedulers instead of engines and no time lost on the way."""

    def __init__(self, requests: SequenceOf[GenerationRequest], *, slots: int, growth: int, fraction: float, retry: int
                 ) -> None:
        self.prefill = scheduler(blocks=16, block_size=4, slots=slots, budget=16, parked_fraction=fraction)
        self.decode = scheduler(blocks=DECODE_BLOCKS, block_size=4, slots=min(slots, DECODE_RUNNING), growth=growth,
                                max_running=DECODE_RUNNING)
        self.admission, self.retry, self.now = Admission(), retry, 0
        self.asked: dict[RequestId, Asked] = {}
        self.preemptions = self.moved_at = 0
        for request in requests:
            self.submit(request)

    def submit(self, request: GenerationRequest) -> None:
        self.asked[request.id] = Asked(request=request)
        self.prefill.add(Sequence(request=request, split=True, max_outputs=request.stop.max_tokens))

    def step(self) -> None:
        self.now += 1
        plan, _ = step(self.prefill, self.now)
        if plan.chunks or self.decode.has_work:
            self.moved_at = self.now
        for sequence in plan.begun:
            self.asked[sequence.id].ask_at = self.now
        for asked in list(self.asked.values()):
            if asked.ask_at is not None and self.now >= asked.ask_at:
                self.ask(asked)
        for sequence in self.prefill.sequences(State.HANDED_OFF):
            asked = self.asked[sequence.id]
            if asked.there is None:
                continue
            asked.outputs = [*sequence.outputs]
            self.prefill.end(sequence)
            if len(asked.outputs) == sequence.max_outputs:
                self.decode.end(asked.there)
                self.over(sequence.id)
            else:
                self.decode.commit(asked.there, [1], self.now)
        self.decode_step()

    def ask(self, asked: Asked) -> None:
        """What `DecodeWorker` does when Begin comes; a refused one comes back after a while."""
        sequence = Sequence(request=asked.request, split=False, max_outputs=asked.request.stop.max_tokens)
        memory, name = self.decode.memory, asked.request.id.name
        load = EngineLoad(waiting=0, running=self.decode.count(State.DECODING), parked=0, free_blocks=memory.cache.available,
                          total_blocks=DECODE_BLOCKS, free_state_slots=memory.slots.free, total_state_slots=memory.slots.total)
        need = Need(blocks=memory.demand(sequence))
        if self.admission.ask(name, need, load, self.now * 0.1) is None:
            if self.decode.reserve(sequence):
                self.admission.admitted(name)
                asked.there, asked.ask_at = sequence, None
                (here,) = self.prefill.of(asked.request.id)
                here.ready = True
                return
            self.admission.refused(name, need, load, self.now * 0.1)
        asked.ask_at = self.now + self.retry

    def decode_step(self) -> None:
        plan, events = step(self.decode, self.now)
        for event in events:
            self.asked[event.request].outputs.append(event.token)
            if event.finish is not None:
                self.over(event.request)
        for id in plan.preempted:
            self.preemptions += 1
            asked = self.over(id)
            self.submit(replace(asked.request, id=replace(id, attempt=id.attempt + 1), output=tuple(asked.outputs)))

    def over(self, id: RequestId) -> Asked:
        self.admission.ended(id.name, self.now * 0.1)
        return self.asked.pop(id)


def made(name: str, prompt: int, outputs: int, priority: int) -> GenerationRequest:
    return GenerationRequest(id=RequestId(name=name), tokens=tuple(range(100, 100 + prompt)), sampling=SamplingParams(),
                             stop=StopParams(max_tokens=outputs), priority=priority)


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(2, 20), st.integers(0, 2)), min_size=1, max_size=20),
       slots=st.sampled_from([0, 2, 6]), growth=st.sampled_from([1, 8, 100]), fraction=st.sampled_from([0.1, 0.25, 1.0]),
       retry=st.integers(1, 5))
def test_nothing_waits_for_ever_when_memory_is_short_on_both_sides(sizes: list[tuple[int, int, int]], slots: int, growth: int,
                                                                   fraction: float, retry: int) -> None:
    """Prompts wait for parked ones, those for room at decode, decoding ones for blocks, preempted ones for prefill again."""
    of = Deployment([made(f"r{number}", *size) for number, size in enumerate(sizes)], slots=slots, growth=growth,
                    fraction=fraction, retry=retry)
    while of.asked:
        of.step()
        assert of.now - of.moved_at < 50, f"after {of.now} steps {[str(id) for id in of.asked]} wait"
        assert of.now < 20_000, "they take turns for ever"
    for side in (of.prefill, of.decode):
        assert not side.sequences()
        assert side.memory.cache.available == side.memory.blocks.total


def test_the_pair_really_preempts_and_refuses() -> None:
    """The property above is about something."""
    of = Deployment([made(f"r{number}", 12, 20, 0) for number in range(8)], slots=6, growth=1, fraction=0.25, retry=2)
    parked = False
    while of.asked:
        of.step()
        parked = parked or any(one.parked for one in of.prefill.sequences(State.HANDED_OFF))
    assert of.preemptions > 0
    assert parked


@settings(max_examples=60, deadline=None)
@given(longs=st.lists(st.tuples(st.integers(33, 300), st.integers(0, 3)), min_size=1, max_size=6),
       shorts=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=30))
def test_short_prompts_and_long_ones_go_on_side_by_side(longs: list[tuple[int, int]], shorts: list[tuple[int, int]]) -> None:
    """(tokens, steps until the next comes). Where there is memory, those that need no more than a quarter of the budget
    together are computed at once, however many long ones there are, and the long ones get three quarters all the time."""
    of = scheduler(blocks=1000, block_size=4, slots=0, budget=32, max_running=32)
    for number, (length, pause) in enumerate((*longs, *shorts)):
        of.add(Sequence(request=made(f"r{number}", length, 1, 0), split=False, max_outputs=1))
        for _ in range(pause):
            left = {one.id: one.prompt_tokens - one.computed for one in of.sequences()}
            quick = [id for id, tokens in left.items() if tokens <= 8]
            wanted = sum(left[id] for id in quick)
            plan, _ = step(of)
            done = {chunk.sequence.id: chunk.count for chunk in plan.chunks}
            if wanted <= 8:
                assert all(done.get(id) == left[id] for id in quick)
            slow = [id for id in left if id not in quick]
            share = min(32 - min(8, wanted) - 3, sum(left[id] for id in slow))  # 3: to end with a block
            assert sum(done.get(id, 0) for id in slow) >= share


@settings(max_examples=60, deadline=None)
@given(classes=st.lists(st.integers(0, 2), min_size=2, max_size=12))
def test_a_better_class_is_computed_first_and_preempted_last(classes: list[int]) -> None:
    of = scheduler(blocks=400, block_size=4, slots=0, budget=8, max_running=8)
    for number, priority in enumerate(classes):
        of.add(Sequence(request=made(f"r{number}", 8, 1, priority), split=False, max_outputs=1))
    order = []
    while of.has_work:
        order += [one.request.priority for one in step(of)[0].admitted]
    assert order == sorted(classes)
    tight = scheduler(blocks=2 * len(classes), block_size=4, slots=0, growth=1, budget=32, max_running=16)
    for number, priority in enumerate(classes):
        tight.add(Sequence(request=made(f"r{number}", 4, 40, priority), split=False, max_outputs=2 * 4 * len(classes) - 4))
    gone: list[int] = []
    while tight.has_work:
        gone += [classes[int(id.name[1:])] for id in step(tight)[0].preempted]
    assert gone == sorted(gone, reverse=True)
    assert len(gone) == len(classes) - 1
