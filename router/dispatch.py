"""One request's way through its two replicas, as a state machine: events in, actions out. Pure.

Both legs get the request at once. Token 0 comes from prefill, the others from decode; whatever comes twice or out of order is
put right here. A busy decode replica costs a new decode attempt of the same transfer and nothing else. The first failure ends
the request and cancels what still runs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.errors import BusyError, ProtocolError, SlipstreamError
from slipstream.types import FinishReason, Logprobs, Role

FIRST_RETRY_SECONDS = 0.02
LONGEST_RETRY_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class LegStats:
    """What a finished leg says of itself."""

    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    kv_bytes: int = 0
    state_bytes: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Send the request to a leg."""

    role: Role
    attempt: int


@dataclass(frozen=True, kw_only=True)
class CancelLeg:
    """Tell a leg that it is no longer wanted."""

    role: Role
    attempt: int


@dataclass(frozen=True, kw_only=True)
class RetryDecode:
    """Choose a decode replica, not the busy one if possible, and call `retry` after `seconds`."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The next output tokens, in order."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    """One per token, if they come with any."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The request is over; the last action."""

    reason: FinishReason | None = None
    error: SlipstreamError | None = None


Action = Submit | CancelLeg | RetryDecode | Tokens | End


class Leg(enum.Enum):
    """How far a leg is."""

    IDLE = "idle"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(kw_only=True)
class Dispatch:
    """Begin with `start`; after an End every event is ignored."""

    stats: dict[Role, LegStats] = field(default_factory=dict)
    over: bool = False
    _legs: dict[Role, Leg] = field(default_factory=lambda: dict.fromkeys(Role, Leg.IDLE))
    _attempts: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    _early: dict[int, int] = field(default_factory=dict)
    _logprobs: dict[int, Logprobs] = field(default_factory=dict)
    _highest: dict[Role, int] = field(default_factory=dict)
    _next_index: int = 0
    _reason: FinishReason | None = None
    _last_index: int | None = None
    _retries: int = 0

    def start(self) -> list[Action]:
        """Both legs at once."""
        self._legs = dict.fromkeys(Role, Leg.RUNNING)
        return [Submit(role=role, attempt=0) for role in Role]

    def tokens(self, role: Role, attempt: int, rows: Sequence[tuple[int, int]],
               logprobs: Mapping[int, Logprobs] | None = None) -> list[Action]:
        """(index, token) rows of one leg, in any order; `logprobs` by index, as far as there are any."""
        if self.over or attempt != self._attempts[role]:
            return []
        for index, token in rows:
            self._highest[role] = max(index, self._highest.get(role, 0))
            if index >= self._next_index:
                self._early.setdefault(index, token)
                if logprobs and index in logprobs:
                    self._logprobs.setdefault(index, logprobs[index])
        return self._deliver()

    def finished(self, role: Role, attempt: int, reason: FinishReason | None, stats: LegStats) -> list[Action]:
        """A leg ended well, after all its tokens. `reason` None: it handed over."""
        if self.over or attempt != self._attempts[role]:
            return []
        self._legs[role] = Leg.ENDED
        if role is Role.DECODE and reason is None:
            return self.give_up(ProtocolError("the decode replica ended without a reason; send it again"))
        if (missing := self._missing(role)) is not None:
            return self.give_up(ProtocolError(f"the {role.value} replica ended without output {missing}; send it again"))
        self.stats[role] = stats
        if reason is not None and self._reason is None:
            self._reason, self._last_index = reason, self._highest.get(role, 0)
        return self._deliver()

    def failed(self, role: Role, attempt: int, error: SlipstreamError, jitter: float = 1.0) -> list[Action]:
        """A leg failed. `jitter`, at most 1, shortens the wait of a retry, so that many that were refused spread."""
        if self.over or attempt != self._attempts[role]:
            return []
        self._legs[role] = Leg.ENDED
        if role is Role.DECODE and isinstance(error, BusyError):
            hint = error.retry_after_seconds or 0.0
            wait = min(LONGEST_RETRY_SECONDS, max(hint, FIRST_RETRY_SECONDS * 2**min(self._retries, 10)))
            self._retries += 1
            return [RetryDecode(seconds=wait * jitter)]
        return self.give_up(error)

    def retry(self) -> list[Action]:
        """Another decode attempt at the same transfer."""
        if self.over or self._legs[Role.DECODE] is Leg.RUNNING:
            return []
        self._attempts[Role.DECODE] += 1
        self._legs[Role.DECODE] = Leg.RUNNING
        return [Submit(role=Role.DECODE, attempt=self._attempts[Role.DECODE])]

    def give_up(self, error: SlipstreamError) -> list[Action]:
        """The client left, the deadline passed, or a leg failed for good."""
        if self.over:
            return []
        self.over = True
        return [*self._cancel(everything=True), End(error=error)]

    def enough(self, reason: FinishReason) -> list[Action]:
        """The text is complete (a stop string): what is still computed is not wanted."""
        if self.over:
            return []
        self.over = True
        return [*self._cancel(everything=True), End(reason=reason)]

    def _missing(self, role: Role) -> int | None:
        """The first output that a leg, now at its end, should have reported: prefill always one, decode up to its highest."""
        first, last = (0, 0) if role is Role.PREFILL else (1, self._highest.get(role, 0))
        return next((index for index in range(max(first, self._next_index), last + 1) if index not in self._early), None)

    def _deliver(self) -> list[Action]:
        ready: list[int] = []
        told: list[Logprobs] = []
        while self._next_index in self._early:
            ready.append(self._early.pop(self._next_index))
            if (logprobs := self._logprobs.pop(self._next_index, None)) is not None:
                told.append(logprobs)
            self._next_index += 1
        actions: list[Action] = [Tokens(tokens=tuple(ready), logprobs=tuple(told))] if ready else []
        if self._reason is not None and self._last_index is not None and self._next_index > self._last_index:
            self.over = True
            actions += self._cancel(everything=False)
            actions.append(End(reason=self._reason))
        return actions

    def _cancel(self, everything: bool) -> list[Action]:
        """Prefill keeps a finished prompt until its destination has spoken, so it is told even after its leg ended. When the
        request ended well a running decode leg is on its way to hear that there is nothing to do, and tells prefill itself."""
        if self._legs[Role.PREFILL] is Leg.IDLE:
            return []  # nobody has heard of the request
        decode_running = self._legs[Role.DECODE] is Leg.RUNNING
        if not everything and (decode_running or Role.DECODE in self.stats):
            return []
        actions: list[Action] = [CancelLeg(role=Role.PREFILL, attempt=self._attempts[Role.PREFILL])]
        if decode_running:
            actions.append(CancelLeg(role=Role.DECODE, attempt=self._attempts[Role.DECODE]))
        return actions
