"""One request's way through its replicas, as a state machine: events in, actions out. Pure.

A *run* is a prefill and a decode leg that serve some of the request's choices. Both legs get the request at once; the first
token of each choice comes from prefill, the others from decode; whatever comes twice or out of order is put right here. At
first one run serves all choices. A busy decode replica costs a new decode attempt of the same run, and nothing else. A *local*
run has the decode leg alone, which computes the prompt too.

*Resume* is the answer to every other failure: the run is given up, its legs are told, and each of its choices that is not over
goes on in a new run, which computes the prompt and the choice's tokens so far and draws the next one. Choices without a token
stay together. Every choice may fail `max_resumes` times; the failure after that ends the request. A preemption is no failure: a
replica that lacks memory now may have it soon.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from router.actions import (
    Action,
    CancelLeg,
    ChoiceEnd,
    End,
    LegStats,
    Resume,
    RetryDecode,
    Row,
    Submit,
    Tokens,
)
from slipstream.errors import (
    BusyError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    PreemptedError,
    ProtocolError,
    RequestTooLargeError,
    SlipstreamError,
)
from slipstream.types import FinishReason, Role

__all__ = ["Action", "CancelLeg", "ChoiceEnd", "Dispatch", "End", "LegStats", "Resume", "RetryDecode", "Row", "Submit",
           "Tokens"]

FIRST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5
FINAL: tuple[type[SlipstreamError], ...] = (InvalidRequestError, RequestTooLargeError, DeadlineError, CancelledError)
"""Failures that another run would meet again."""


# State -----------------------------------------------------------------------------------------------------------------


class Leg(enum.Enum):
    """How far a leg is."""

    IDLE = "idle"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(kw_only=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)
    early: dict[int, Row] = field(default_factory=dict)
    """By index: what came before its turn."""
    over: bool = False
    failures: int = 0
    preemptions: int = 0


@dataclass(kw_only=True)
class _Run:
    choices: tuple[int, ...]
    base: int
    """Index of the tokens that its prefill draws."""
    legs: dict[Role, Leg] = field(default_factory=lambda: dict.fromkeys(Role, Leg.IDLE))
    well: set[Role] = field(default_factory=set)
    """Legs that ended as they should."""
    counted: set[Role] = field(default_factory=set)
    """Legs whose stats are known."""
    local: bool = False
    """Decode computes the prompt too: the prefill leg stays idle."""
    decode_attempt: int = 0
    busy: int = 0

    def attempt(self, role: Role) -> int:
        return self.decode_attempt if role is Role.DECODE else 0


class Dispatch:
    """Begin with `start`; after an End every event is ignored."""

    def __init__(self, choices: Iterable[int] = (0,), max_resumes: int = 3) -> None:
        self.over = False
        self.resumes = 0
        self.stats: dict[Role, LegStats] = {}
        """Of all finished legs together; `cached_tokens` of the first run alone: a later one finds what that one computed."""
        self._choices = {choice: _Choice() for choice in choices}
        self._max_resumes = max_resumes
        self._runs: dict[int, _Run] = {}
        self._numbers = 0

    def start(self, *, local: bool = False) -> list[Action]:
        """One run for all choices."""
        return self.begin(self._new_run(tuple(self._choices), 0), local=local)

    def begin(self, number: int, *, local: bool = False) -> list[Action]:
        """Replicas were found for a run: both legs at once, or the only one of a `local` run."""
        run = self._runs.get(number)
        if self.over or run is None:
            return []
        run.local = local
        roles = [Role.DECODE] if local else list(Role)
        run.legs |= dict.fromkeys(roles, Leg.RUNNING)
        return [self._submit(number, run, role) for role in roles]

    def output(self, number: int) -> tuple[int, ...]:
        """What a run's prefill computes behind the prompt: nothing, or of the choice that it resumes."""
        run = self._runs.get(number)
        return () if run is None else tuple(self._choices[run.choices[0]].tokens[: run.base])

    def wants(self, number: int) -> bool:
        """False once a run is given up, or its choices are over: a stop string may end them while it waits for replicas."""
        return not self.over and number in self._runs

    def outputs(self) -> list[tuple[int, ...]]:
        """What each choice has put out so far."""
        return [tuple(choice.tokens) for choice in self._choices.values()]

    # What workers say ---------------------------------------------------------------------------------------------------

    def tokens(self, number: int, role: Role, attempt: int, rows: Sequence[Row]) -> list[Action]:
        """Tokens of one leg, in any order."""
        run = self._live(number, role, attempt)
        if run is None:
            return []
        own = [row for row in rows if row.choice in run.choices
               and (row.index == run.base if role is Role.PREFILL else row.index >= run.base + (not run.local))]
        for row in own:
            choice = self._choices[row.choice]
            if row.index >= len(choice.tokens) and not choice.over:
                choice.early.setdefault(row.index, row)
        actions: list[Action] = []
        for name in dict.fromkeys(row.choice for row in own):
            actions += self._deliver(name)
        return actions + self._settle(number, run)

    def computed(self, number: int, role: Role, attempt: int, stats: LegStats) -> None:
        """What a leg says of itself. Prefill's comes with its token: once decode has all others, nobody waits for its end."""
        run = self._live(number, role, attempt)
        if run is not None and role not in run.counted:
            run.counted.add(role)
            self._add(role, stats, first=number == 0)

    def finished(self, number: int, role: Role, attempt: int, stats: LegStats, *, handed_off: bool = False) -> list[Action]:
        """A leg ended well, after all its tokens. `handed_off`: prefill's, and decode has what it needs to go on."""
        run = self._live(number, role, attempt)
        if run is None:
            return []
        run.legs[role] = Leg.ENDED
        run.well.add(role)
        self.computed(number, role, attempt, stats)
        if any(self._falls_short(name, run, role, handed_off) for name in run.choices):
            return self._resume(number, run, ProtocolError(f"the {role.value} replica ended before it had reported all tokens"))
        return self._settle(number, run)

    def failed(self, number: int, role: Role, attempt: int, error: SlipstreamError, jitter: float = 1.0) -> list[Action]:
        """A leg failed. `jitter`, at most 1, shortens the wait before the next try, so that many that were refused spread."""
        run = self._live(number, role, attempt)
        if run is None:
            return []
        run.legs[role] = Leg.ENDED
        if all(self._choices[name].over for name in run.choices):
            return self._settle(number, run)
        if role is Role.DECODE and isinstance(error, BusyError):
            wait = min(LONGEST_PAUSE_SECONDS, max(error.retry_after_seconds or 0.0, _pause(run.busy)))
            run.busy += 1
            return [RetryDecode(run=number, seconds=wait * jitter)]
        return self.give_up(error) if isinstance(error, FINAL) else self._resume(number, run, error, jitter)

    # What the router says -----------------------------------------------------------------------------------------------

    def retry(self, number: int) -> list[Action]:
        """Another decode attempt of the same run."""
        run = self._runs.get(number)
        if self.over or run is None or run.legs[Role.DECODE] is not Leg.ENDED:
            return []
        run.decode_attempt += 1
        run.legs[Role.DECODE] = Leg.RUNNING
        return [self._submit(number, run, Role.DECODE)]

    def broken(self, number: int, error: SlipstreamError) -> list[Action]:
        """The run cannot go on for a reason that its legs do not know, such as a picture that did not arrive."""
        run = self._runs.get(number)
        if self.over or run is None:
            return []
        return self.give_up(error) if isinstance(error, FINAL) else self._resume(number, run, error)

    def enough(self, name: int) -> list[Action]:
        """The text of a choice is complete (a stop string): what is still computed of it is not wanted."""
        if self.over or self._choices[name].over:
            return []
        actions = self._end_choice(name, FinishReason.STOP)
        for number, run in list(self._runs.items()):
            if all(self._choices[other].over for other in run.choices):
                actions += self._cancel(number, run, everything=True)
                del self._runs[number]
        return actions + self._end_if_over()

    def give_up(self, error: SlipstreamError) -> list[Action]:
        """The client left, the deadline passed, or there is no way to go on."""
        if self.over:
            return []
        self.over = True
        complete = all(choice.over for choice in self._choices.values())
        actions = [action for number, run in self._runs.items() for action in self._cancel(number, run, everything=True)]
        return [*actions, End(error=None if complete else error)]

    # ---------------------------------------------------------------------------------------------------------------------

    def _live(self, number: int, role: Role, attempt: int) -> _Run | None:
        """The run, if it is one whose leg still speaks."""
        run = self._runs.get(number)
        return run if run is not None and not self.over and run.attempt(role) == attempt else None

    def _new_run(self, choices: tuple[int, ...], base: int) -> int:
        number, self._numbers = self._numbers, self._numbers + 1
        self._runs[number] = _Run(choices=choices, base=base)
        return number

    def _submit(self, number: int, run: _Run, role: Role) -> Submit:
        return Submit(run=number, role=role, attempt=run.attempt(role), choices=run.choices, output=self.output(number),
                      local=run.local)

    def _deliver(self, name: int) -> list[Action]:
        choice, ready = self._choices[name], list[Row]()
        while not choice.over and (row := choice.early.pop(len(choice.tokens), None)) is not None:
            choice.tokens.append(row.token)
            ready.append(row)
            if row.finish is not None:
                break
        if not ready:
            return []
        told = tuple(row.logprobs for row in ready if row.logprobs is not None)
        actions: list[Action] = [Tokens(choice=name, tokens=tuple(row.token for row in ready), logprobs=told)]
        reason = ready[-1].finish
        return actions if reason is None else actions + self._end_choice(name, reason)

    def _end_choice(self, name: int, reason: FinishReason) -> list[Action]:
        choice = self._choices[name]
        choice.over = True
        choice.early.clear()
        return [ChoiceEnd(choice=name, reason=reason)]

    def _falls_short(self, name: int, run: _Run, role: Role, handed_off: bool) -> bool:
        """True if a leg that has ended owes tokens of an open choice: prefill the first one, and decode those up to a last one.
        A decode leg that has none of them may have heard that prefill's token is the last."""
        choice = self._choices[name]
        if choice.over:
            return False
        if run.local:
            return True
        if role is Role.PREFILL:
            return len(choice.tokens) <= run.base or not handed_off or Role.DECODE in run.well
        if not choice.early and len(choice.tokens) <= run.base:
            return Role.PREFILL in run.well
        index = max(len(choice.tokens), run.base + 1)
        while (row := choice.early.get(index)) is not None and row.finish is None:
            index += 1
        return row is None

    def _settle(self, number: int, run: _Run) -> list[Action]:
        """Forget a run whose choices are all over, once a leg of it has said how it went."""
        if not all(self._choices[name].over for name in run.choices) or Leg.ENDED not in run.legs.values():
            return []
        if run.legs[Role.PREFILL] is Leg.ENDED and run.legs[Role.DECODE] is Leg.RUNNING and self._decoded(run):
            return []  # decode brought the last token: its own end is on its way
        del self._runs[number]
        return self._cancel(number, run, everything=False) + self._end_if_over()

    def _decoded(self, run: _Run) -> bool:
        return any(len(self._choices[name].tokens) > run.base + 1 for name in run.choices)

    def _end_if_over(self) -> list[Action]:
        if self._runs or not all(choice.over for choice in self._choices.values()):
            return []
        self.over = True
        return [End()]

    def _resume(self, number: int, run: _Run, error: SlipstreamError, jitter: float = 1.0) -> list[Action]:
        del self._runs[number]
        names = [name for name in run.choices if not self._choices[name].over]
        counted = not isinstance(error, PreemptedError)
        for choice in (self._choices[name] for name in names):
            choice.early.clear()
            choice.failures += counted
            choice.preemptions += not counted
        actions = self._cancel(number, run, everything=True)
        if any(self._choices[name].failures > self._max_resumes for name in names):
            return actions + self.give_up(error)
        begun = [name for name in names if self._choices[name].tokens]
        fresh = tuple(name for name in names if not self._choices[name].tokens)
        for group in [(name,) for name in begun] + ([fresh] if fresh else []):
            first = self._choices[group[0]]
            new = self._new_run(group, len(first.tokens))
            self.resumes += 1
            pause = _pause(first.failures + first.preemptions - 1) * jitter
            actions.append(Resume(run=new, seconds=pause, error=error))
        return actions + self._end_if_over()

    def _cancel(self, number: int, run: _Run, *, everything: bool) -> list[Action]:
        """Prefill keeps a finished prompt until its destination has spoken, so it is told even after its leg ended. When
        all went well the legs tell each other: prefill that there is nothing to decode, or decode that it has everything."""
        prefill, decode = run.legs[Role.PREFILL], run.legs[Role.DECODE]
        if run.local:
            return [CancelLeg(run=number, role=Role.DECODE, attempt=run.decode_attempt)] if decode is Leg.RUNNING else []
        if prefill is Leg.IDLE:
            return []  # nobody has heard of the run
        if not everything and (Role.DECODE in run.well or (decode is Leg.RUNNING and Role.PREFILL in run.well)):
            return []
        actions: list[Action] = [CancelLeg(run=number, role=Role.PREFILL, attempt=0)]
        if decode is Leg.RUNNING:
            actions.append(CancelLeg(run=number, role=Role.DECODE, attempt=run.decode_attempt))
        return actions

    def _add(self, role: Role, more: LegStats, *, first: bool) -> None:
        before = self.stats.get(role, LegStats(cached_tokens=more.cached_tokens if first else 0))
        both = {key.name: getattr(before, key.name) + getattr(more, key.name) for key in fields(LegStats)}
        self.stats[role] = LegStats(**both | {"cached_tokens": before.cached_tokens})


def _pause(times_before: int) -> float:
    return float(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(times_before, 10)))
