"""Tables of vectors that are loaded, never drawn; knows no text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.layers.linear import Cut
from slipstream.layers.parallel import Communicator
from slipstream.sharding import rows_of


def empty_embedding(rows: int, size: int) -> nn.Embedding:
    """[rows, size], to be filled. nn.Embedding draws values; on the meta device that imports torch's compiler, for seconds."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, size), freeze=False)  # type: ignore[no-untyped-call]
    return table


class Vocabulary(nn.Module):
    """A vector for each token, cut by rows among the tensor ranks: the embedding, the head, or both in one."""

    def __init__(self, tokens: int, size: int, comm: Communicator) -> None:
        super().__init__()
        self.comm, self.tokens = comm, tokens
        self.rows = rows_of(tokens, comm.shard.tp, comm.shard.tp_rank)
        self.weight = Cut(tokens, (self.rows,)).parameter(size)

    def forward(self, ids: Tensor) -> Tensor:
        """[T] -> [T, size], equal on every rank: only the rank that holds a row adds anything to the sum."""
        if self.comm.shard.tp == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.rows.start
        outside = (local < 0) | (local >= len(self.rows))
        table = self.weight if len(self.rows) else self.weight.new_zeros(1, self.weight.shape[1])
        vectors = F.embedding(local.masked_fill(outside, 0), table).masked_fill(outside[:, None], 0.0)
        return self.comm.all_reduce(vectors)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[R, size] -> [R, tokens] float32 on tensor rank 0, None elsewhere."""
        own = F.linear(hidden, self.weight)
        if short := len(rows_of(self.tokens, self.comm.shard.tp, 0)) - len(self.rows):
            own = F.pad(own, (0, short))
        found = self.comm.gather(own)
        return None if found is None else found[:, : self.tokens].float()
