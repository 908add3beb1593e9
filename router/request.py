"""One request as workers are asked for it, and whether what they tell is what was asked. Knows no worker and no run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from router.actions import Row, Submit
from router.prompt import Prompt
from slipstream.rpc import convert
from slipstream.types import Grammar, PromptLogprobs, SamplingParams, StopParams
from slipstream.v1 import worker_pb2


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

    def message(self, action: Submit, *, handle: int, name: str, secret: str, scores: bool) -> worker_pb2.Submit:
        """For one leg. `name`: of the run; `scores`: it is to tell of the prompt's tokens."""
        message = worker_pb2.Submit(
            handle=handle, request_id=name, attempt=action.attempt, transfer_id=f"{name}/{secret}",
            tokens=self.prompt.tokens, output=action.output, choices=action.choices, priority=self.priority,
            cache_salt=self.cache_salt, local=action.local, grammar=convert.grammar_to_pb(self.grammar),
            sampling=convert.sampling_to_pb(self.sampling), prompt_logprobs=self.prompt_logprobs if scores else None,
            images=[convert.image_to_pb(picture.content_hash, picture.grid) for picture in self.prompt.pictures],
            remaining_ms=max(1, int((self.deadline - time.monotonic()) * 1000)))
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
