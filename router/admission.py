"""Whose turn it is: what runs and waits at most, by priority and in fairness among clients. Pure; knows no clock and no HTTP.

A request enters (and is counted from then on), its prompt is prepared, it asks with the tokens that it is expected to take, and
runs when its turn comes. Lower priority numbers go first; among equals the clients share by weight: each request gets a virtual
time at which it would end if its client had a share of its own (start-time fair queueing), and the earliest goes first. One
that does not fit keeps its place, so that many small ones cannot starve a large one; one whose client is at its own limit is
passed by.
"""

from __future__ import annotations

import bisect
import enum
from dataclasses import dataclass, field

from slipstream.errors import OverloadedError

LONGEST_RETRY_SECONDS = 60.0
FIRST_GUESS_TOKENS = 256.0
"""Output that a request is expected to have, before any has ended."""
MEMORY = 0.9
"""What a running mean keeps of the past at each new value."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """Who sends requests, and what it may take. 0: no limit."""

    name: str = ""
    """Empty: whoever comes, where no keys are configured."""
    weight: float = 1.0
    """Its share among clients that wait."""
    max_in_flight: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and outputs."""


ANYBODY = Client()


class Phase(enum.Enum):
    """Where a request is."""

    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


@dataclass(eq=False, kw_only=True)
class Turn:
    """One request's place. The Admission alone changes it."""

    client: Client
    priority: int
    number: int
    phase: Phase = Phase.PREPARING
    cost: float = 0.0
    """Tokens that it is expected to take."""
    prompt_tokens: int = 0
    began: float = 0.0
    end_time: float = 0.0
    """Virtual."""
    refusal: OverloadedError | None = None
    """Why it lost its place: it is over."""

    @property
    def place(self) -> tuple[int, float, int]:
        """Lower goes first."""
        return self.priority, self.end_time, self.number


@dataclass(kw_only=True)
class _Bucket:
    """What a client may still take of something, refilled all the time and holding a minute's worth at most."""

    per_minute: float
    level: float
    at: float

    def wait(self, wanted: float, now: float) -> float:
        """Seconds until `wanted`, or a full bucket if that is less, is there."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return max(0.0, (min(wanted, self.per_minute) - self.level) * 60 / self.per_minute)


@dataclass(kw_only=True)
class _Account:
    """What is known of a client."""

    requests: _Bucket | None
    tokens: _Bucket | None
    held: int = 0
    running: int = 0
    end_time: float = 0.0
    """Virtual, of its last request."""


@dataclass(kw_only=True)
class Admission:
    """The turns of one router."""

    max_running: int
    max_waiting: int = 0
    max_tokens: int = 0
    """That running requests may be expected to take together; 0: no limit. A larger request runs alone."""
    running: int = field(default=0, init=False)
    held: int = field(default=0, init=False)
    """Requests that have entered and are not over."""
    tokens: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._waiting: list[Turn] = []
        self._accounts: dict[str, _Account] = {}
        self._numbers = 0
        self._virtual = 0.0
        self._output_tokens = FIRST_GUESS_TOKENS
        self._seconds = 1.0

    @property
    def waiting(self) -> int:
        """Requests that are prepared and wait for their turn."""
        return len(self._waiting)

    def enter(self, client: Client, priority: int, now: float) -> tuple[Turn, list[Turn]]:
        """A place, and who lost theirs to it. Raises OverloadedError: the router is full, or the client has had its share."""
        account = self._account(client, now)
        for bucket, limit, wanted in ((account.requests, "requests_per_minute", 1), (account.tokens, "tokens_per_minute", 1)):
            if bucket is not None and (seconds := bucket.wait(wanted, now)):
                raise OverloadedError(f"the key {client.name} has used up its {limit} ({bucket.per_minute:g}); come back later",
                                      retry_after_seconds=min(LONGEST_RETRY_SECONDS, seconds))
        lost: list[Turn] = []
        if self.held >= self.max_running + self.max_waiting:
            if not self._waiting or self._waiting[-1].priority <= priority:
                raise self._full(f"{self.held} requests are in flight, the limit of this router; come back later")
            last = self._waiting[-1]
            last.refusal = self._full("requests of a better priority came, and this router is full; come back later")
            self.leave(last, now=now)
            lost.append(last)
        if account.requests is not None:
            account.requests.level -= 1
        self._numbers += 1
        self.held += 1
        account.held += 1
        return Turn(client=client, priority=priority, number=self._numbers), lost

    def ask(self, turn: Turn, *, prompt_tokens: int, most_output: int, now: float) -> list[Turn]:
        """The prompt is ready: who runs now. Raises OverloadedError where the client has no tokens left for it."""
        assert turn.phase is Phase.PREPARING, "asks once"
        account = self._account(turn.client, now)
        if account.tokens is not None:
            if seconds := account.tokens.wait(prompt_tokens, now):
                raise OverloadedError(f"the key {turn.client.name} has {max(0, int(account.tokens.level))} of its "
                                      f"{turn.client.tokens_per_minute} tokens_per_minute left, and the prompt has "
                                      f"{prompt_tokens}; come back later",
                                      retry_after_seconds=min(LONGEST_RETRY_SECONDS, seconds))
            account.tokens.level -= prompt_tokens
        turn.prompt_tokens, turn.cost = prompt_tokens, prompt_tokens + min(most_output, self._output_tokens)
        turn.end_time = account.end_time = max(self._virtual, account.end_time) + turn.cost / turn.client.weight
        turn.phase = Phase.WAITING
        bisect.insort(self._waiting, turn, key=lambda one: one.place)
        return self._next(now)

    def leave(self, turn: Turn, *, output_tokens: int = 0, now: float) -> list[Turn]:
        """It is over, however it ended: who runs now. Nothing happens the second time."""
        if turn.phase is Phase.OVER:
            return []
        account = self._account(turn.client, now)
        if turn.phase is Phase.WAITING:
            self._waiting.remove(turn)
        elif turn.phase is Phase.RUNNING:
            self.running -= 1
            account.running -= 1
            self.tokens -= turn.cost
            self._seconds = MEMORY * self._seconds + (1 - MEMORY) * (now - turn.began)
            self._output_tokens = MEMORY * self._output_tokens + (1 - MEMORY) * output_tokens
        if account.tokens is not None:
            account.tokens.level -= output_tokens
        self.held -= 1
        account.held -= 1
        turn.phase = Phase.OVER
        return self._next(now)

    def _next(self, now: float) -> list[Turn]:
        begun: list[Turn] = []
        for turn in tuple(self._waiting):
            fits = not self.max_tokens or not self.running or self.tokens + turn.cost <= self.max_tokens
            if self.running >= self.max_running or not fits:
                break
            account = self._account(turn.client, now)
            if turn.client.max_in_flight and account.running >= turn.client.max_in_flight:
                continue
            self._waiting.remove(turn)
            turn.phase, turn.began = Phase.RUNNING, now
            self._virtual = max(self._virtual, turn.end_time - turn.cost / turn.client.weight)
            self.running += 1
            account.running += 1
            self.tokens += turn.cost
            begun.append(turn)
        return begun

    def _full(self, message: str) -> OverloadedError:
        """With the time until those that wait have had their turns, by what requests took so far."""
        seconds = self._seconds * (1 + len(self._waiting)) / self.max_running
        return OverloadedError(message, retry_after_seconds=min(LONGEST_RETRY_SECONDS, max(1.0, seconds)))

    def _account(self, client: Client, now: float) -> _Account:
        found = self._accounts.get(client.name)
        if found is None:
            buckets = [_Bucket(per_minute=limit, level=limit, at=now) if limit else None
                       for limit in (client.requests_per_minute, client.tokens_per_minute)]
            found = self._accounts[client.name] = _Account(requests=buckets[0], tokens=buckets[1])
        return found
