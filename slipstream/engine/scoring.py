"""How probable a prompt's own tokens were, by the logits of the rows before them. Knows no sequence and no schedule.

Logits come a piece of rows at a time and are gone after it: what stays of a row is its token's logprob and rank, and the most
probable tokens. Q rows, R of a piece, N most probable tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.types import PromptLogprobs


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Of Q rows, on the host."""

    logprobs: NDArray[np.float32]
    """[Q] of the token after each row."""
    ranks: NDArray[np.int32]
    """[Q] 1: no token is more probable."""
    top_tokens: NDArray[np.int32]
    """[Q, N] most probable first."""
    top_logprobs: NDArray[np.float32]
    """[Q, N]."""

    def part(self, start: int, end: int, top: int) -> Scores:
        """Rows [start, end), with as many of the most probable tokens."""
        return Scores(logprobs=self.logprobs[start:end], ranks=self.ranks[start:end],
                      top_tokens=self.top_tokens[start:end, :top], top_logprobs=self.top_logprobs[start:end, :top])

    @property
    def sound(self) -> bool:
        """False if logits were no numbers."""
        return not (np.isnan(self.logprobs).any() or np.isnan(self.top_logprobs).any())


class Scorer:
    """Takes the logits of a step's scored rows, in order."""

    def __init__(self, scored: NDArray[np.int32], device: torch.device) -> None:
        """`scored`: see StepInput."""
        self._targets = torch.from_numpy(scored[:, 1].astype(np.int64)).to(device)
        self._top = int(scored[:, 2].max(initial=0))
        self._done = 0
        self._pieces: list[tuple[Tensor, ...]] = []

    def add(self, logits_RV: Tensor) -> None:
        """Float32 logits of the next R rows."""
        targets = self._targets[self._done : self._done + len(logits_RV), None]
        self._done += len(logits_RV)
        values_RV = torch.log_softmax(logits_RV, dim=-1)
        own = values_RV.gather(-1, targets)
        best, ids = values_RV.topk(min(self._top, values_RV.shape[-1]))
        self._pieces.append((own[:, 0], (values_RV > own).sum(-1) + 1, ids, best))

    def scores(self) -> Scores:
        """Once all rows were added, of which there is one at least."""
        own, ranks, ids, best = (torch.cat(column).cpu().numpy() for column in zip(*self._pieces, strict=True))
        return Scores(logprobs=own, ranks=ranks.astype(np.int32), top_tokens=ids.astype(np.int32), top_logprobs=best)


def joined(parts: Sequence[Scores]) -> PromptLogprobs:
    """Of a whole prompt, chunk by chunk; a prompt of one token has none."""
    def column(name: str) -> tuple[object, ...]:
        return tuple(value for part in parts for value in getattr(part, name).ravel().tolist())

    return PromptLogprobs(**{name: column(name) for name in ("logprobs", "ranks", "top_tokens", "top_logprobs")})  # type: ignore[arg-type]
