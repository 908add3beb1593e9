"""What a request's state machine hears of its legs, and what it wants to be done. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import SlipstreamError
from slipstream.types import FinishReason, Logprobs, PromptLogprobs, Role


@dataclass(frozen=True, kw_only=True)
class LegStats:
    """What finished legs say of themselves."""

    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    kv_bytes: int = 0
    state_bytes: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A token as a worker reports it."""

    choice: int
    index: int
    token: int
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None
    prompt: PromptLogprobs | None = None
    """With the first token of a prompt, if they were asked for."""


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Send a run to one of its legs."""

    run: int
    role: Role
    attempt: int = 0
    choices: tuple[int, ...]
    output: tuple[int, ...] = ()
    """Resume: what the one choice has put out so far."""
    local: bool = False
    """The decode replica computes the prompt too: there is no other leg."""


@dataclass(frozen=True, kw_only=True)
class CancelLeg:
    """Tell a leg that it is no longer wanted."""

    run: int
    role: Role
    attempt: int


@dataclass(frozen=True, kw_only=True)
class RetryDecode:
    """Choose a decode replica for the run, not the busy one if possible, and call `retry` after `seconds`."""

    run: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Choose two replicas for a new run, not those that failed if possible, and call `begin` after `seconds`."""

    run: int
    seconds: float
    error: SlipstreamError
    """Why."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The next output tokens of a choice, in order."""

    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    """One per token, if they come with any."""


@dataclass(frozen=True, kw_only=True)
class ChoiceEnd:
    """No token of the choice follows."""

    choice: int
    reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class End:
    """The request is over; the last action. Without an error every choice has ended."""

    error: SlipstreamError | None = None


Action = Submit | CancelLeg | RetryDecode | Resume | Tokens | ChoiceEnd | End
