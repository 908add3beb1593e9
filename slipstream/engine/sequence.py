"""A request's life in the engine: its states, its tokens, when it stops. Knows no pool, no tensor and no clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.engine.ledger import Owner, OwnerKind
from slipstream.errors import InternalError
from slipstream.types import FinishReason, Grammar, Grid, RequestId, SamplingParams, StopParams


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What the engine is asked to generate."""

    id: RequestId
    tokens: tuple[int, ...]
    """The prompt, image placeholders expanded."""
    grids: tuple[Grid, ...] = ()
    """One per image, in prompt order."""
    images: tuple[bytes, ...] = ()
    """Content hash of each image, where the caller knows them: without, a prompt with images is not cached."""
    sampling: SamplingParams
    stop: StopParams
    choices: tuple[int, ...] = (0,)
    """Numbers of the choices that are wanted, ascending: each is drawn by itself from the same prompt."""
    output: tuple[int, ...] = ()
    """Resume: what the one choice has put out so far. Computed like a prompt, counted as output."""
    priority: int = 0
    """Lower goes first."""
    cache_salt: str = ""
    """Requests of different salts share no cached block."""
    grammar: Grammar | None = None
    """The form that each choice's text must have."""
    prompt_logprobs: int | None = None
    """Most probable tokens to report with every token of the prompt but the first; None: report nothing. The prompt is then
    computed as a whole: cached blocks have no logits."""


class Matcher(Protocol):
    """How far a text of a given form is."""

    def copy(self) -> Matcher:
        """Another one that is as far."""

    def allowed_along(self, drafts: tuple[int, ...]) -> list[bytes]:
        """A bit for each token that may come next, the lowest of the first byte for token 0; then the same after each of the
        drafts, as far as they are allowed."""

    def accept(self, token: int) -> None:
        """The next token, which is allowed."""

    def ends_with(self, token: int) -> bool:
        """True if nothing can follow this token."""


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    """Submitted; owns nothing."""
    COMPUTING = "computing"
    """Its prompt is being computed; it owns its blocks and slot."""
    HANDED_OFF = "handed_off"
    """The prompt is computed and the first token sampled; a transfer owns the blocks and slot until `release`."""
    LENT = "lent"
    """Nothing is computed: a transfer reads what was cached of the prompt, and owns a copy of the states after that."""
    RESERVED = "reserved"
    """Its prompt is computed elsewhere, or by the sequence that it will branch off; a reservation owns its blocks and slot."""
    DECODING = "decoding"
    """One token a step."""
    ENDED = "ended"
    """Owns nothing any more; the engine forgets it."""


_NEXT: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.COMPUTING, State.RESERVED, State.LENT, State.ENDED}),
    State.COMPUTING: frozenset({State.HANDED_OFF, State.DECODING, State.ENDED}),
    State.HANDED_OFF: frozenset({State.ENDED}),
    State.LENT: frozenset({State.ENDED}),
    State.RESERVED: frozenset({State.DECODING, State.ENDED}),
    State.DECODING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}

_OWNER: dict[State, OwnerKind] = {
    State.COMPUTING: OwnerKind.SEQUENCE,
    State.HANDED_OFF: OwnerKind.TRANSFER,
    State.LENT: OwnerKind.TRANSFER,
    State.RESERVED: OwnerKind.RESERVATION,
    State.DECODING: OwnerKind.SEQUENCE,
}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds that a request spent here."""

    queue_seconds: float
    """Submitted to first chunk scheduled; 0 for a sequence whose prompt was computed elsewhere."""
    compute_seconds: float
    """First chunk scheduled (or committed) to the last token so far."""
    cached_tokens: int = 0
    """Of its prompt, those that were here when its memory was taken."""


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One choice of a request, or all of them while they have the same tokens. The scheduler alone changes its state."""

    request: GenerationRequest
    split: bool
    """True: only the prompt is computed here, another replica decodes."""
    max_outputs: int
    """Output tokens after which it ends: max_tokens, or less where the context is full before."""
    choices: tuple[int, ...] = ()
    """The choices that it stands for; the request's until it branches."""
    branches: tuple[Sequence, ...] = ()
    """The sequences of the choices after the first, from the moment that memory was taken for them until they branch off."""
    state: State = State.WAITING
    number: int = 0
    """Order of arrival here."""
    keys: list[bytes] | None = None
    """Keys of its whole blocks as far as they are known; None: it is not to be found in the prefix cache."""
    blocks: tuple[int, ...] = ()
    """Block table. The first `shared` of it are the cache's, pinned; the others are owned as the state says."""
    shared: int = 0
    state_slot: int | None = None
    spare_slots: tuple[int, ...] = ()
    """One for each draft of a step; their contents mean nothing between steps."""
    drafts: tuple[int, ...] = ()
    """What may follow its last token, from the step before."""
    cached: int = 0
    """Tokens that were here when its memory was taken; before that, when it came."""
    snapshot_at: tuple[int, ...] = ()
    """Lengths of the prompt, whole blocks, after which a snapshot of the states would be found by others."""
    snapshot: bytes | None = None
    """Key of the last block of its output after which it left one."""
    computed: int = 0
    """Tokens that the caches hold."""
    ahead: int = 0
    """Tokens beyond those that steps which have begun, and not ended, compute."""
    doomed: bool = False
    """It ends, and gives back what it holds, as soon as no step works on it any more."""
    matcher: Matcher | None = None
    """After `outputs`; None: the text is free."""
    outputs: list[int] = field(default_factory=list)
    """Of its choice; in a resumed request from the beginning."""
    begun: bool = False
    """Its publisher was told that the scheduler reached it."""
    ready: bool = False
    """Its destination can take the bytes as they come. Otherwise what it owns is parked memory."""
    submitted_at: float = 0.0
    started_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.choices = self.choices or self.request.choices
        self.outputs = self.outputs or list(self.request.output)

    @property
    def id(self) -> RequestId:
        """Of the request."""
        return self.request.id

    @property
    def prompt_tokens(self) -> int:
        """Tokens that are computed before one is drawn: the prompt, and in a resumed request its output before."""
        return len(self.request.tokens) + len(self.request.output)

    @property
    def rows(self) -> int:
        """Cache rows that it needs at worst: the last output token is never fed back, so it needs none."""
        return self.prompt_tokens if self.split else len(self.request.tokens) + self.max_outputs - 1

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Lower goes first, and is preempted last: by class, then what had begun elsewhere already, then by arrival."""
        return self.request.priority, not self.request.output, self.number

    @property
    def parked(self) -> bool:
        """True if it holds memory for a destination that is not ready to take it."""
        return self.split and not self.ready and self.state in (State.COMPUTING, State.HANDED_OFF)

    @property
    def slots(self) -> tuple[int, ...]:
        """All state slots that it holds."""
        return () if self.state_slot is None else (self.state_slot, *self.spare_slots)

    @property
    def owner(self) -> Owner:
        """In whose name the pools hold its own blocks and slot. Raises InternalError in a state that owns nothing."""
        kind = _OWNER.get(self.state)
        if kind is None:
            raise InternalError(f"{self.id} is {self.state.value} and owns nothing")
        return Owner(kind=kind, request=self.id, choice=self.choices[0])

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens of rows [start, end), which are known."""
        prompt = self.request.tokens
        if start >= len(prompt):
            return tuple(self.outputs[start - len(prompt) : end - len(prompt)])
        return prompt[start:end] + tuple(self.outputs[: max(0, end - len(prompt))])

    def move(self, state: State) -> None:
        """Change the state. Raises InternalError for a step that no sequence may take."""
        if state not in _NEXT[self.state]:
            raise InternalError(f"{self.id} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def finish_with(self, token: int) -> FinishReason | None:
        """Why the sequence would end if `token` were its next output; None if it would go on."""
        stop = self.request.stop
        if not stop.ignore_eos and token in stop.stop_token_ids:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.ends_with(token):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.outputs) + 1 >= self.max_outputs else None

    def append(self, token: int) -> None:
        """The next output."""
        self.outputs.append(token)
        if self.matcher is not None:
            self.matcher.accept(token)

    def begin_as(self, other: Sequence, token: int) -> None:
        """It has been as `other` so far, and goes on with a token of its own."""
        self.matcher = other.matcher.copy() if other.matcher is not None else None
        self.started_at, self.last_token_at = other.started_at, other.last_token_at
        self.append(token)

    def timing(self) -> Timing:
        """Seconds so far; zeros for what has not begun."""
        if self.started_at is None:
            return Timing(queue_seconds=0.0, compute_seconds=0.0)
        last = self.started_at if self.last_token_at is None else self.last_token_at
        return Timing(queue_seconds=self.started_at - self.submitted_at, compute_seconds=last - self.started_at,
                      cached_tokens=self.cached)
