"""A request as it runs: what workers are asked for, and whether what they tell is that; its bounds, its milestones, what its
reader gets. Knows no worker."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.actions import ChoiceEnd, End, Row, Submit, Tokens
from router.prompt import Prompt
from slipstream.rpc import convert
from slipstream.types import Grammar, PromptLogprobs, SamplingParams, StopParams
from slipstream.v1 import worker_pb2

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
    prompt_logprobs: int | None = None
    """Most probable tokens to tell with each of the prompt's; None: tell nothing of them."""

    def asked(self, name: str, output: Sequence[int]) -> worker_pb2.Submit:
        """The prompt, with the `output` that a resumed run goes on from."""
        return worker_pb2.Submit(
            request_id=name, tokens=self.prompt.tokens, output=output, cache_salt=self.cache_salt, priority=self.priority,
            images=[convert.image_to_pb(picture.content_hash, picture.grid) for picture in self.prompt.pictures])

    def message(self, action: Submit, *, handle: int, name: str, secret: str, scores: bool) -> worker_pb2.Submit:
        """For one leg. `name`: of the run; `scores`: it is to tell of the prompt's tokens."""
        message = self.asked(name, action.output)
        message.MergeFrom(worker_pb2.Submit(
            handle=handle, attempt=action.attempt, transfer_id=f"{name}/{secret}", choices=action.choices, local=action.local,
            grammar=convert.grammar_to_pb(self.grammar), sampling=convert.sampling_to_pb(self.sampling),
            prompt_logprobs=self.prompt_logprobs if scores else None,
            remaining_ms=max(1, int((self.deadline - time.monotonic()) * 1000))))
        convert.stop_to_pb(self.stop, message)
        return message

    def is_sound(self, rows: Sequence[Row]) -> bool:
        """Whether tokens come with the logprobs that were asked for; minus infinity is one."""
        wanted = self.sampling.logprobs
        return wanted is None or all(
            (told := row.logprobs) is not None and len(told.top) == wanted and not any(map(math.isnan, (
                told.logprob, *dict(told.top).values()))) for row in rows)

    def is_whole(self, told: PromptLogprobs) -> bool:
        """Whether this is what was asked for of the prompt's tokens."""
        rows = len(self.prompt.tokens) - 1
        tops = rows * (self.prompt_logprobs or 0)
        lengths = (len(told.logprobs), len(told.ranks), len(told.top_tokens), len(told.top_logprobs))
        return lengths == (rows, rows, tops, tops) and not any(map(math.isnan, (*told.logprobs, *told.top_logprobs)))


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
