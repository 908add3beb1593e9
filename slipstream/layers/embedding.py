"""Tables of vectors that are loaded, never drawn."""

from __future__ import annotations

import torch
from torch import nn


def empty_embedding(rows: int, size: int) -> nn.Embedding:
    """[rows, size], to be filled. nn.Embedding draws values; on the meta device that imports torch's compiler, for seconds."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, size), freeze=False)  # type: ignore[no-untyped-call]
    return table
