"""Decides what the next step computes and who holds memory for it; knows no tensor, no clock and no thread.

Order: every decoding sequence first (one token each), then prompts that hold memory already, then new prompts, both first
come first served. A prompt gets all its blocks at once when it is admitted, so half-computed prompts never wait for each
other. A prompt that must wait for memory keeps its place: nothing overtakes it but prompts that have begun before, for which
memory is kept. The other exception is a prompt that may not start because too much memory is parked already: those whose
destination is ready overtake it, as they will hold nothing long.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engine.block_pool import BlockPool
from slipstream.engine.sequence import Sequence, State
from slipstream.engine.state_pool import StatePool
from slipstream.errors import InternalError
from slipstream.types import FinishReason, RequestId, TokenEvent

LOOK_AHEAD = 8
"""Waiting prompts that may tell their destination to get ready while parked memory is at its limit."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one sequence does in one step: tokens [start, start + count) go through the model."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """True if the step draws the sequence's next token."""
        return self.start + self.count >= self.sequence.prompt_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids that go in."""
        if self.start >= self.sequence.prompt_tokens:
            return (self.sequence.outputs[self.start - self.sequence.prompt_tokens],)
        return self.sequence.request.tokens[self.start : self.start + self.count]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What to do in one step, in this order."""

    begun: tuple[Sequence, ...]
    """Reached for the first time."""
    admitted: tuple[Sequence, ...]
    """Got their blocks and slot."""
    chunks: tuple[Chunk, ...]
    """Empty: nothing can run until something changes."""


class Scheduler:
    """The sequences of one engine by state, and the pools that they draw from."""

    def __init__(self, *, blocks: BlockPool, slots: StatePool, max_running: int, max_batch_tokens: int,
                 chunk_tokens: int = 0, parked_fraction: float = 1.0) -> None:
        """`chunk_tokens` 0: only the budget limits a chunk. `parked_fraction`: see `_may_start`."""
        assert 0 < max_running <= max_batch_tokens, "every running sequence must be able to take a token a step"
        self.blocks = blocks
        self.slots = slots
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._chunk_tokens = chunk_tokens or max_batch_tokens
        self._parked_blocks_limit = int(blocks.total * parked_fraction)
        self._parked_slots_limit = max(1, int(slots.total * parked_fraction))
        self._of: dict[State, dict[RequestId, Sequence]] = {state: {} for state in State if state is not State.ENDED}

    # What there is ---------------------------------------------------------------------------------------------------

    def sequences(self, *states: State) -> list[Sequence]:
        """The sequences in these states (none named: all), oldest in its state first."""
        return [sequence for state in states or self._of for sequence in self._of[state].values()]

    def count(self, *states: State) -> int:
        """How many sequences are in these states."""
        return sum(len(self._of[state]) for state in states)

    @property
    def has_work(self) -> bool:
        """True if a sequence waits for steps (a step may still find that none can run now)."""
        return bool(self._of[State.WAITING] or self._of[State.COMPUTING] or self._of[State.DECODING])

    # Coming in -------------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt."""
        assert sequence.state is State.WAITING, "only a new sequence can be queued"
        self._of[State.WAITING][sequence.id] = sequence

    def reserve(self, sequence: Sequence) -> bool:
        """Take the memory for a prompt that is computed elsewhere and for its growth; False if there is none now."""
        if self._running >= self._max_running or not self._fits(sequence):
            return False
        self.add(sequence)
        self._move(sequence, State.RESERVED)
        self._take(sequence)
        return True

    def commit(self, sequence: Sequence, first_token: int, now: float) -> None:
        """The reserved sequence's bytes are in: decode from its first output token on."""
        self._move(sequence, State.DECODING)
        sequence.computed = sequence.prompt_tokens
        sequence.outputs.append(first_token)
        sequence.started_at = sequence.submitted_at = sequence.last_token_at = now

    # A step ----------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """The next step. Admits prompts: they own their memory when this returns."""
        chunks = [Chunk(sequence=sequence, start=sequence.computed, count=1) for sequence in self._of[State.DECODING].values()]
        budget = self._max_batch_tokens - len(chunks)
        for sequence in self._of[State.COMPUTING].values():
            if budget:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].count
        begun, admitted = [], []
        look_ahead, blocked = LOOK_AHEAD, False
        parked = [other for other in self.sequences(State.COMPUTING, State.HANDED_OFF) if other.parked]
        for sequence in list(self._of[State.WAITING].values()):
            if not budget or self._running >= self._max_running:
                break
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
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].count
            elif look_ahead:
                look_ahead -= 1
        for chunk in chunks:
            self._check(chunk)
        return StepPlan(begun=tuple(begun), admitted=tuple(admitted), chunks=tuple(chunks))

    def advance(self, chunk: Chunk, token: int | None, now: float) -> TokenEvent | None:
        """The chunk is in the caches and `token` was drawn (None iff the chunk does not sample). May end the sequence."""
        sequence = chunk.sequence
        assert sequence.computed == chunk.start, "a plan is carried out before the next one is made"
        assert (token is not None) == chunk.samples, "a token is drawn where the plan says so"
        sequence.computed += chunk.count
        if token is None:
            return None
        finish: FinishReason | None = sequence.finish_with(token)
        sequence.outputs.append(token)
        sequence.last_token_at = now
        event = TokenEvent(request=sequence.id, choice=0, index=len(sequence.outputs) - 1, token=token, finish=finish)
        if sequence.split:
            self._move(sequence, State.HANDED_OFF)
        elif finish is not None:
            self.end(sequence)
        elif sequence.state is State.COMPUTING:
            self._move(sequence, State.DECODING)
        return event

    def end(self, sequence: Sequence) -> None:
        """Return everything that the sequence owns and forget it. Legal in every state."""
        if sequence.state is not State.WAITING:
            self.blocks.give_back(sequence.blocks, sequence.owner)
            if sequence.state_slot is not None:
                self.slots.give_back(sequence.state_slot, sequence.owner)
        sequence.blocks, sequence.state_slot = (), None
        del self._of[sequence.state][sequence.id]
        sequence.move(State.ENDED)

    # Proof -----------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise InternalError unless pools and sequences agree about every block and slot."""
        self.blocks.check_integrity()
        self.slots.check_integrity()
        blocks, slots = {}, {}
        for state, sequences in self._of.items():
            for sequence in sequences.values():
                if sequence.state is not state:
                    raise InternalError(f"{sequence.id} is {sequence.state.value} in the list of {state.value}")
                if state is State.WAITING:
                    if sequence.blocks or sequence.state_slot is not None:
                        raise InternalError(f"{sequence.id} waits and holds memory")
                    continue
                blocks.update(dict.fromkeys(sequence.blocks, sequence.owner))
                if sequence.state_slot is not None:
                    slots[sequence.state_slot] = sequence.owner
        for what, held, owned in (("blocks", blocks, self.blocks.owned()), ("slots", slots, self.slots.owned())):
            if held != owned:
                wrong = ", ".join(sorted(f"{unit} of {owner}" for unit, owner in held.items() ^ owned.items()))
                raise InternalError(f"sequences and pool disagree about {what}: {wrong}")

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> int:
        """Sequences that take part in steps, or may at any time."""
        return self.count(State.COMPUTING, State.RESERVED, State.DECODING)

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        left = sequence.prompt_tokens - sequence.computed
        return Chunk(sequence=sequence, start=sequence.computed, count=min(left, self._chunk_tokens, budget))

    def _may_start(self, sequence: Sequence, parked: list[Sequence]) -> bool:
        """False while a prompt without a ready destination would take parked memory over its limit.

        One that is larger than the limit by itself may start when nothing else is parked: it could never start otherwise.
        """
        if not sequence.split or sequence.ready or not parked:
            return True
        held = sum(len(other.blocks) for other in parked) + self.blocks.blocks_for(sequence.rows)
        slots = len(parked) + 1 if self.slots.total else 0
        return held <= self._parked_blocks_limit and slots <= self._parked_slots_limit

    def _unpromised(self, sequence: Sequence) -> bool:
        """True if it fits beside the waiting prompts that have begun: their destinations may hold memory for them already, so
        theirs must be there here. Otherwise they would wait for parked prompts, and those for the memory held there, for ever.
        """
        begun = [other for other in self._of[State.WAITING].values() if other.begun and other is not sequence]
        blocks = sum(self.blocks.blocks_for(other.rows) for other in (*begun, sequence))
        return blocks <= self.blocks.free and (not self.slots.total or len(begun) < self.slots.free)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        if not self._fits(sequence):
            return False
        self._move(sequence, State.COMPUTING)
        self._take(sequence)
        sequence.started_at = now
        return True

    def _fits(self, sequence: Sequence) -> bool:
        return self.blocks.blocks_for(sequence.rows) <= self.blocks.free and (not self.slots.total or self.slots.free > 0)

    def _take(self, sequence: Sequence) -> None:
        """Take all blocks and the slot in the name of the sequence's state; it fits."""
        blocks = self.blocks.take(self.blocks.blocks_for(sequence.rows), sequence.owner)
        assert blocks is not None, "the caller checked that it fits"
        sequence.blocks = blocks
        sequence.state_slot = self.slots.take(sequence.owner) if self.slots.total else None

    def _move(self, sequence: Sequence, state: State) -> None:
        """Change the state, the list and the name in which memory is held."""
        before = sequence.state
        old = None if before is State.WAITING else sequence.owner
        sequence.move(state)
        del self._of[before][sequence.id]
        self._of[state][sequence.id] = sequence
        if old is not None and old != sequence.owner:
            self.blocks.reassign(sequence.blocks, old, sequence.owner)
            if sequence.state_slot is not None:
                self.slots.reassign(sequence.state_slot, old, sequence.owner)

    def _check(self, chunk: Chunk) -> None:
        """Nothing is written into memory that the sequence does not own."""
        sequence = chunk.sequence
        if chunk.start + chunk.count > sequence.rows:
            raise InternalError(f"{sequence.id} would write row {chunk.start + chunk.count - 1} of {sequence.rows}")
        self.blocks.check_write(sequence.blocks, chunk.start, chunk.count, sequence.owner)
        if sequence.state_slot is not None:
            self.slots.check_owner(sequence.state_slot, sequence.owner)
