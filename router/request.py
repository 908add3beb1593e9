"""A request as it runs: what workers are asked for, its bounds, its milestones, what its reader gets. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.actions import ChoiceEnd, End, Tokens
from router.prompt import Prompt
from slipstream.types import Grammar, SamplingParams, StopParams

RUN_MARK = "~"
"""Between a request's id and the number of a run after its first, in the id that workers know; no client's id holds it."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What the workers are asked for."""

    id: str
    prompt: Prompt
    sampling: SamplingParams
    stop: StopParams
    deadline: float
    """time.monotonic()."""
    choices: int = 1
    priority: int = 0
    cache_salt: str = ""
    grammar: Grammar | None = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """What has come since the reader last looked."""

    news: tuple[Tokens | ChoiceEnd, ...] = ()
    end: End | None = None


@dataclass(kw_only=True)
class Times:
    """time.monotonic() of a request's milestones."""

    arrived: float
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)
    """By choice."""
    ended: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a request may use up."""

    unread_bytes: int
    max_resumes: int
    resume_wait_seconds: float
