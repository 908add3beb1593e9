"""Decides what the next step computes, who gets memory for it and who must give some back. Pure; knows no tensor and no clock.

Order: every decoding sequence first (one token each), then prompts that hold memory already, then new prompts; among prompts
`Sequence.rank` says who is first. A prompt gets all its blocks at once when it is admitted, so half-computed prompts never wait
for each other. A prompt that must wait for memory keeps its place: nothing overtakes it but prompts that have begun before, for
which memory is kept. The other exception is a prompt that may not start because too much memory is parked already: those whose
destination is ready overtake it, as they will hold nothing long. A quarter of the budget is kept from long prompts while a
short one could use it, so that no prompt waits for the whole of a long one.

A decoding sequence grows as it goes. When there is no block left for it the last one in rank is preempted: its request ends
here, and whoever sent it resumes it elsewhere, or here once there is room.

Drafts are verified with the tokens of a step that nobody else needs, and take only blocks that nobody else needs now: they may
change how fast a sequence goes, and nothing else.

A plan may be made while earlier ones are carried out: it goes on where those will end, and has nothing for a sequence whose
next token is being drawn. What ends meanwhile is doomed, and keeps its memory until the last step on it is over.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from slipstream.engine.budget import Budget, Chunk
from slipstream.engine.memory import Memory
from slipstream.engine.sequence import Sequence, State
from slipstream.errors import InternalError
from slipstream.types import RequestId, TokenEvent

LOOK_AHEAD = 8
"""Waiting prompts that may tell their destination to get ready while parked memory is at its limit."""

Key = tuple[RequestId, int]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What to do in one step, in this order."""

    preempted: tuple[RequestId, ...]
    """Gave their memory back and are forgotten here."""
    begun: tuple[Sequence, ...]
    """Reached for the first time."""
    admitted: tuple[Sequence, ...]
    """Got their blocks and slot."""
    chunks: tuple[Chunk, ...]
    """Empty: nothing can run until something changes."""


class Scheduler:
    """The sequences of one engine by state, and the memory that they draw from."""

    def __init__(self, memory: Memory, *, max_running: int, max_batch_tokens: int, chunk_tokens: int = 0,
                 parked_fraction: float = 1.0) -> None:
        """`chunk_tokens` 0: only the budget limits a chunk. `parked_fraction`: see `_may_start`."""
        assert 0 < max_running <= max_batch_tokens, "every running sequence must be able to take a token a step"
        self.memory = memory
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._chunk_tokens = chunk_tokens or max_batch_tokens
        self._parked_blocks_limit = int(memory.blocks.total * parked_fraction)
        self._parked_slots_limit = max(1, int(memory.slots.total * parked_fraction))
        self._of: dict[State, dict[Key, Sequence]] = {state: {} for state in State if state is not State.ENDED}
        self._requests: dict[RequestId, list[Sequence]] = {}
        self._arrivals = 0

    # What there is ---------------------------------------------------------------------------------------------------

    def sequences(self, *states: State) -> list[Sequence]:
        """The sequences in these states (none named: all), oldest in its state first."""
        return [sequence for state in states or self._of for sequence in self._of[state].values()]

    def count(self, *states: State) -> int:
        """How many sequences are in these states."""
        return sum(len(self._of[state]) for state in states)

    def of(self, request: RequestId) -> SequenceOf[Sequence]:
        """The sequences of a request that have not ended, its first choice's first."""
        return tuple(self._requests.get(request, ()))

    @property
    def has_work(self) -> bool:
        """True if a sequence waits for steps (a step may still find that none can run now)."""
        return bool(self._of[State.WAITING] or self._of[State.COMPUTING] or self._of[State.DECODING])

    @property
    def waiting_tokens(self) -> int:
        """Of prompts, those that no step has begun to compute, without what was cached of them when they came."""
        prompts = self.sequences(State.WAITING, State.COMPUTING)
        return sum(_left(one) - (one.cached if one.state is State.WAITING else 0) for one in prompts)

    # Coming in -------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt."""
        assert sequence.state is State.WAITING, "only a new sequence can be queued"
        self._arrivals += 1
        sequence.number, sequence.cached = self._arrivals, self.memory.cached_tokens(sequence)
        self._of[State.WAITING][_key(sequence)] = sequence
        self._requests[sequence.id] = [sequence]

    def reserve(self, sequence: Sequence) -> bool:
        """Take the memory for a prompt that is computed elsewhere; False if there is none now.

        Each sequence that may still grow keeps one block from newcomers.
        """
        keep = sum(self.memory.may_grow(one) for one in self.sequences(State.DECODING, State.RESERVED))
        if not self._has_room(sequence) or not self.memory.fits(sequence, computes=False, keep=keep):
            return False
        self.add(sequence)
        self._take(sequence, State.RESERVED, computes=False)
        return True

    def lend(self, sequence: Sequence) -> bool:
        """Hold what is cached of a prompt for a transfer; False if nothing is, or if that could cost others their memory."""
        if not self.memory.lendable(sequence, keep=self.count(State.DECODING, State.RESERVED)):
            return False
        self.add(sequence)
        self._move(sequence, State.LENT)
        self.memory.lend(sequence)
        return True

    def commit(self, sequence: Sequence, first_tokens: SequenceOf[int], now: float) -> None:
        """The reserved sequence's bytes are in: decode from its first output tokens on, one per choice."""
        self._move(sequence, State.DECODING)
        sequence.computed = sequence.prompt_tokens
        sequence.started_at = sequence.submitted_at = now
        self.memory.share_full(sequence)
        self._draw(sequence, first_tokens, now)

    # A step ----------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """The next step. Admits prompts: they own their memory when this returns."""
        preempted = self._grow()
        chunks = [Chunk(sequence=sequence, start=sequence.computed, count=1) for sequence in self._idle(State.DECODING)
                  if self.memory.has_next_row(sequence)]
        budget = Budget(self._max_batch_tokens - len(chunks), self._chunk_tokens, self.memory.blocks.block_size,
                         (_left(one) for one in self.sequences(State.COMPUTING, State.WAITING)))
        prompts: list[Chunk] = []
        for sequence in sorted(self._of[State.COMPUTING].values(), key=_rank):
            if _left(sequence) and not sequence.doomed:
                self._schedule(sequence, budget, prompts)
        begun, admitted = [], []
        look_ahead, blocked = LOOK_AHEAD, False
        parked = [other for other in self.sequences(State.COMPUTING, State.HANDED_OFF) if other.parked]
        for sequence in sorted(self._of[State.WAITING].values(), key=_rank):
            if not budget.left or not self._has_room(sequence):
                break
            if not budget.has_for(sequence.prompt_tokens):
                continue
            starts = self._may_start(sequence, parked)
            if blocked and not (starts and sequence.begun):
                continue
            if starts and not (self._unpromised(sequence) and self._admit(sequence, now)):
                blocked = True
                continue
            if not sequence.begun and (starts or (look_ahead and self._unpromised(sequence))):
                sequence.begun = True
                begun.append(sequence)
            if starts:
                if sequence.parked:
                    parked.append(sequence)
                admitted.append(sequence)
                self._schedule(sequence, budget, prompts)
            elif look_ahead:
                look_ahead -= 1
        budget.spend_rest(prompts)
        chunks = [self._with_snapshots(chunk) for chunk in (*self._with_drafts(chunks, budget.left), *prompts)]
        for chunk in chunks:
            self.memory.check_write(chunk.sequence, chunk.start, chunk.reach - chunk.start)
            chunk.sequence.ahead += chunk.count
        return StepPlan(preempted=preempted, begun=tuple(begun), admitted=tuple(admitted), chunks=tuple(chunks))

    def advance(self, chunk: Chunk, tokens: SequenceOf[int], now: float, drafts: tuple[int, ...] = ()) -> list[TokenEvent]:
        """The chunk is in the caches and `tokens` were drawn: one per choice (none iff it does not sample), behind those of its
        drafts that are right; `drafts`: what may come after these. May end it."""
        sequence = chunk.sequence
        assert sequence.computed == chunk.start, "plans are carried out in the order in which they were made"
        sequence.ahead -= chunk.count
        if sequence.doomed:
            self._drop(chunk)
            self.end(sequence)
            return []
        if chunk.start >= sequence.prompt_tokens:
            return self._decoded(chunk, tokens, now, drafts)
        assert len(tokens) == (len(sequence.choices) if chunk.samples else 0), "tokens are drawn where the plan says so"
        sequence.computed = chunk.end
        self.memory.share_full(sequence)
        if chunk.snapshots:
            self.memory.keep_snapshots(sequence, chunk.snapshots)
        return self._draw(sequence, tokens, now) if tokens else []

    def _decoded(self, chunk: Chunk, tokens: SequenceOf[int], now: float, drafts: tuple[int, ...]) -> list[TokenEvent]:
        """All but the last of the tokens are the chunk's drafts. What comes after one that ends the sequence does not count."""
        sequence, events = chunk.sequence, list[TokenEvent]()
        assert 1 <= len(tokens) <= chunk.sampled, "tokens are drawn where the plan says so"
        self.memory.choose_state(sequence, len(tokens) - 1)
        sequence.drafts = drafts
        for count, token in enumerate(tokens, 1):
            sequence.computed = chunk.start + count
            self.memory.share_full(sequence)
            events += self._draw(sequence, (token,), now)
            if sequence.state is State.ENDED:
                break
        if chunk.snapshots:
            self.memory.keep_snapshots(sequence, chunk.snapshots)
        return events

    def discard(self, chunk: Chunk) -> None:
        """The chunk failed: the slots of its snapshots return. Its sequence is ended by the caller, if it was not before."""
        chunk.sequence.ahead -= chunk.count
        self._drop(chunk)
        if chunk.sequence.doomed:
            self.end(chunk.sequence)

    def _drop(self, chunk: Chunk) -> None:
        for _, slot in chunk.snapshots:
            self.memory.cache.drop(slot)

    def end(self, sequence: Sequence) -> None:
        """Return everything that the sequence owns and forget it, after the steps that work on it. Legal in every state."""
        if sequence.ahead:
            sequence.doomed = True
            return
        if sequence.state is not State.WAITING:
            self.memory.release(sequence)
        del self._of[sequence.state][_key(sequence)]
        sequence.move(State.ENDED)
        left = self._requests[sequence.id]
        left.remove(sequence)
        if not left:
            del self._requests[sequence.id]

    def end_request(self, request: RequestId) -> None:
        """End all that is left of a request."""
        for sequence in self.of(request):
            self.end(sequence)

    # Proof -----------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise InternalError unless memory, lists and requests agree about every block, slot and sequence."""
        for state, sequences in self._of.items():
            for sequence in sequences.values():
                if sequence.state is not state:
                    raise InternalError(f"{sequence.id} is {sequence.state.value} in the list of {state.value}")
        everyone = self.sequences()
        self.memory.check_integrity(everyone)
        known = [sequence for left in self._requests.values() for sequence in left]
        if {id(one) for one in known} != {id(one) for one in everyone} or len(known) != len(everyone):
            raise InternalError("the lists of states and of requests hold different sequences")

    # Prompts ----------------------------------------------------------------------------------------------------------

    def _has_room(self, sequence: Sequence) -> bool:
        """True if it may run, with its branches, beside all that take part in steps or may at any time."""
        running = self.count(State.COMPUTING, State.RESERVED, State.DECODING)
        return running + (1 if sequence.split else len(sequence.choices)) <= self._max_running

    def _schedule(self, sequence: Sequence, budget: Budget, prompts: list[Chunk]) -> None:
        start = sequence.computed + sequence.ahead
        count = budget.take(start, _left(sequence))
        if count:
            prompts.append(Chunk(sequence=sequence, start=start, count=count))

    def _with_drafts(self, chunks: list[Chunk], tokens: int) -> list[Chunk]:
        """Chunks that decode, with as many drafts as there are `tokens`, rows and blocks for, and the room for new ones."""
        if not self.memory.draft_tokens:
            return chunks
        found = []
        for chunk in chunks:
            sequence, blocks = chunk.sequence, self.memory.room(chunk.sequence)
            last = sequence.rows - 1 - chunk.start  # rows behind the first that it may come to need
            drafts = sequence.drafts[: max(0, min(tokens, last, blocks - 1))]
            tokens -= len(drafts)
            found.append(replace(chunk, count=1 + len(drafts), drafts=drafts, room=max(0, min(last - 1, blocks - 1))))
        return found

    def _with_snapshots(self, chunk: Chunk) -> Chunk:
        found = self.memory.snapshots(chunk.sequence, chunk.start, chunk.end)
        return replace(chunk, snapshots=found) if found else chunk

    def _may_start(self, sequence: Sequence, parked: list[Sequence]) -> bool:
        """False while a prompt without a ready destination would take parked memory over its limit.

        One that is larger than the limit by itself may start when nothing else is parked: it could never start otherwise.
        """
        if not sequence.split or sequence.ready or not parked:
            return True
        held = sum(len(other.blocks) for other in parked) + self.memory.demand(sequence)
        slots = len(parked) + 1 if self.memory.slots.total else 0
        return held <= self._parked_blocks_limit and slots <= self._parked_slots_limit

    def _unpromised(self, sequence: Sequence) -> bool:
        """True if it fits beside the waiting prompts that have begun: their destinations may hold memory for them already, so
        theirs must be there here. Otherwise they would wait for parked prompts, and those for the memory held there, for ever.
        """
        memory = self.memory
        begun = [other for other in self._of[State.WAITING].values() if other.begun and other is not sequence]
        if not begun:
            return memory.fits(sequence, computes=True)
        blocks = sum(memory.demand(other) for other in (*begun, sequence))
        slots = sum(memory.slots_of(other) for other in (*begun, sequence))
        return blocks <= memory.cache.available and slots <= memory.slots.free

    def _admit(self, sequence: Sequence, now: float) -> bool:
        if not self.memory.fits(sequence, computes=True):
            return False
        self._take(sequence, State.COMPUTING, computes=True)
        sequence.started_at = now
        return True

    def _take(self, sequence: Sequence, state: State, *, computes: bool) -> None:
        """Give a waiting sequence its memory, and make the branches that share it later; it fits."""
        self._move(sequence, state)
        if not sequence.split:
            sequence.branches = tuple(
                Sequence(request=sequence.request, split=False, max_outputs=sequence.max_outputs, choices=(choice,),
                         number=sequence.number, submitted_at=sequence.submitted_at) for choice in sequence.choices[1:])
            for branch in sequence.branches:
                branch.move(State.RESERVED)
                self._of[State.RESERVED][_key(branch)] = branch
                self._requests[sequence.id].append(branch)
        self.memory.take(sequence, computes=computes)

    # Tokens -----------------------------------------------------------------------------------------------------------

    def _draw(self, sequence: Sequence, tokens: SequenceOf[int], now: float) -> list[TokenEvent]:
        """The next token of each choice. The choices of one sequence go ways of their own from here on."""
        sequence.last_token_at = now
        index = len(sequence.outputs)
        events = [TokenEvent(request=sequence.id, choice=choice, index=index, token=token, finish=sequence.finish_with(token))
                  for choice, token in zip(sequence.choices, tokens, strict=True)]
        if sequence.split:
            sequence.append(tokens[0])
            self._move(sequence, State.HANDED_OFF)
            return events
        branches, sequence.branches = sequence.branches, ()
        for branch, event in zip(branches, events[1:], strict=True):
            if event.finish is not None:
                self.end(branch)
                continue
            self.memory.branch(sequence, branch)
            branch.begin_as(sequence, event.token)
            self._move(branch, State.DECODING)
        sequence.choices = sequence.choices[:1]
        sequence.append(tokens[0])
        if events[0].finish is not None:
            self.end(sequence)
        elif sequence.state is State.COMPUTING:
            self._move(sequence, State.DECODING)
        return events

    def _grow(self) -> tuple[RequestId, ...]:
        """Give every decoding sequence a block for its next row, first in rank first; who must give way for that."""
        preempted: list[RequestId] = []
        for sequence in sorted(self._idle(State.DECODING), key=_rank):
            while sequence.state is State.DECODING and not self.memory.grow(sequence):
                last: Sequence = max(self._of[State.DECODING].values(), key=_rank)
                if any(one.ahead for one in self.of(last.id)):
                    break  # its memory comes back after the steps that work on it: too late for this one
                preempted.append(last.id)
                self.end_request(last.id)
        if most := self.memory.draft_tokens:
            for sequence in sorted(self._idle(State.DECODING), key=_rank):
                if self.memory.cache.available > self.count(State.DECODING, State.RESERVED):
                    self.memory.grow(sequence, min(1 + 2 * most, sequence.rows - sequence.computed))
        return tuple(preempted)

    def _idle(self, state: State) -> list[Sequence]:
        """Those of a state on which no step works now."""
        return [sequence for sequence in self._of[state].values() if not sequence.ahead]

    def _move(self, sequence: Sequence, state: State) -> None:
        """Change the state, the list and the name in which memory is held."""
        before = sequence.state
        old = None if before is State.WAITING else sequence.owner
        sequence.move(state)
        del self._of[before][_key(sequence)]
        self._of[state][_key(sequence)] = sequence
        if old is not None:
            self.memory.rename(sequence, old)


def _key(sequence: Sequence) -> Key:
    return sequence.id, sequence.choices[0]


def _left(sequence: Sequence) -> int:
    """Tokens of its prompt that no step has begun to compute."""
    return sequence.prompt_tokens - sequence.computed - sequence.ahead


def _rank(sequence: Sequence) -> tuple[int, bool, int]:
    return sequence.rank


