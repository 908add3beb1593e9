"""Verifies drafts by what was drawn, and proposes the next ones, on the last stage. Knows no sequence and no pool.

A draft is right if the token drawn at its place is the same; its step's other rows then stand as if the draft had been drawn
before. For drafts that are no sample themselves this is rejection sampling: the draft d counts with the model's own p(d), and
where it does not, what was drawn is p without d, scaled. As each draw has its own random number, output is the same token for
token as without drafts. D sequences that draft, E of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import StepInput
from slipstream.errors import ConfigError
from slipstream.layers.batch import DraftCache, ForwardBatch, LayerCache
from slipstream.layers.parallel import Communicator
from slipstream.models.registry import DraftingModel, LanguageModel
from slipstream.types import Logprobs


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One token, or None: its logits are not finite."""

    token: int | None
    logprobs: Logprobs | None = None
    """If the draw asked for them."""
    drafts: tuple[int, ...] = ()
    """Proposals for the tokens after it, where the step was to make some."""


def accepted(drafts: Sequence[int], drawn: Sequence[Drawn]) -> int:
    """How many drafts are right, from the first on; `drawn` has one more."""
    for count, (draft, one) in enumerate(zip(drafts, drawn, strict=False)):
        if one.token != draft:
            return count
    return len(drafts)


class Drafter:
    """One rank's side; all tensor ranks of the stage make the same calls."""

    def __init__(self, model: LanguageModel, cache: LayerCache, tokens: int, comm: Communicator | None) -> None:
        """`tokens`: the most for one sequence and step. Raises ConfigError for a model that drafts none."""
        if not isinstance(model, DraftingModel) or not isinstance(cache, DraftCache):
            raise ConfigError("speculative.tokens: this model was loaded without the layer that drafts",
                              field="speculative.tokens")
        self._model, self._cache, self._tokens, self._comm = model, cache, tokens, comm

    def propose(self, step: StepInput, batch: ForwardBatch, drawn: Sequence[Drawn]) -> list[Drawn]:
        """`drawn` (on tensor rank 0; others have none) with drafts behind the token that counts last of each sequence."""
        found = list(drawn)
        if not len(step.drafting):
            return found
        device = batch.token_ids.device
        begins = np.cumsum(step.query_lens) - step.query_lens
        ends = self._ends(step, begins, found)
        counts, last = (torch.from_numpy(column.astype(np.int64)).to(device) for column in ends.T)
        entries = torch.from_numpy(step.drafting[:, 1].astype(np.int64)).to(device) + counts
        rows = torch.from_numpy(step.context_lens.astype(np.int64)).to(device)[entries] + 1
        before = batch.positions[torch.from_numpy(begins).to(device)[entries]]
        hidden, tables = self._cache.hidden[batch.state_slots[entries]], batch.block_tables[entries]
        wanted = np.clip(step.drafting[:, 3] - ends[:, 0], 0, self._tokens)
        drafts: list[list[int]] = [[] for _ in ends]
        for turn in range(int(wanted.max())):
            going = np.flatnonzero(wanted > turn)
            some = torch.from_numpy(going).to(device)
            last[some], hidden[some] = self._model.draft(last[some], hidden[some], before[some] + turn, tables[some],
                                                         rows[some] + turn, self._cache)
            for place, token in zip(going.tolist(), last[some].tolist(), strict=True):
                drafts[place].append(token)
        for (first, *_), (count, _), made in zip(step.drafting.tolist(), ends.tolist(), drafts, strict=True):
            if found:
                found[first + count] = replace(found[first + count], drafts=tuple(made))
        return found

    def _ends(self, step: StepInput, begins: np.ndarray, drawn: Sequence[Drawn]) -> np.ndarray:
        """[D, 2] drafts that are right, and the token after them: found by tensor rank 0, the same on all."""
        ends: Tensor | None = None
        if self._comm is None or self._comm.shard.tp_rank == 0:
            found = []
            for first, entry, count, _ in step.drafting.tolist():
                tokens = step.token_ids[begins[entry + 1 : entry + count]].tolist()
                right = accepted(tokens, drawn[first : first + count])
                found.append((right, drawn[first + right].token or 0))  # of a sequence that fails any token will do
            ends = torch.tensor(found, dtype=torch.int64, device=self._cache.hidden.device)
        if self._comm is not None:
            ends = self._comm.broadcast(ends, (*step.drafting.shape[:1], 2), torch.int64)
        assert ends is not None
        return ends.cpu().numpy()
