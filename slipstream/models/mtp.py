"""Multi-token prediction: the layer that drafts tokens from the model's own output; knows no schedule and no verification.

The layer takes pairs: token j, embedded, beside the model's output (after its final norm) for token j - 1, and predicts
token j + 1. A pair is rotated by the position of token j - 1, lies in row j of the layer's KV, and attends to the pairs up to
its own. Further drafts go on from the layer's own output in the place of the model's. T rows of a batch, E sequences that
draft, B longest block table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.checkpoint import Checkpoint
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.batch import DraftCache, ForwardBatch
from slipstream.layers.linear import ColumnLinear, Cut
from slipstream.layers.norm import RMSNorm
from slipstream.layers.parallel import Communicator
from slipstream.layers.rope import Rotary
from slipstream.layers.traits import Traits
from slipstream.models.decoder import DecoderLayer


class Predictor(nn.Module):
    """`mtp.*` of a checkpoint; embedding and head are the model's."""

    def __init__(self, checkpoint: Checkpoint, kernels: Kernels, comm: Communicator, traits: Traits) -> None:
        super().__init__()
        hidden, eps = checkpoint.hidden_size, checkpoint.rms_norm_eps
        self.fc = ColumnLinear(2 * hidden, Cut.all(hidden))
        self.pre_fc_norm_embedding = RMSNorm(kernels, hidden, eps, traits.unit_offset)
        self.pre_fc_norm_hidden = RMSNorm(kernels, hidden, eps, traits.unit_offset)
        self.layers = nn.ModuleList([DecoderLayer(checkpoint, checkpoint.depth, kernels, comm, traits)])
        self.norm = RMSNorm(kernels, hidden, eps, traits.unit_offset)
        self.rotary = Rotary(checkpoint.rope)

    @property
    def layer(self) -> DecoderLayer:
        """The only one."""
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def store(self, embeds: Tensor, hidden: Tensor, batch: ForwardBatch, cache: DraftCache) -> None:
        """Write the pairs of a batch's tokens, and each sequence's last output. embeds and hidden [T, hidden]: what goes into
        the first layer, and comes out of the final norm. Nothing attends: keys and values do not depend on it."""
        assert batch.before is not None, "the positions of the tokens before are needed"
        ends = torch.tensor(batch.query_lens, device=hidden.device).cumsum(0)
        starts = ends - ends.new_tensor(batch.query_lens)
        before = torch.cat((hidden[:1], hidden[:-1]))
        carried = cache.hidden[batch.sources].masked_fill(ends.new_tensor(batch.context_lens)[:, None] == 0, 0.0)
        if batch.follows:
            begins = ~torch.tensor(batch.follows, device=hidden.device)
            starts, carried = starts[begins], carried[begins]
        before[starts] = carried
        normed = self.layer.input_layernorm(self._join(embeds, before))
        self.layer.self_attn.store(normed, self.rotary(batch.before, normed.dtype), batch.slot_mapping, cache)
        cache.hidden.index_copy_(0, batch.state_slots, hidden[ends - 1])

    def forward(self, embeds: Tensor, hidden: Tensor, before: Tensor, block_tables: Tensor, rows: Tensor, cache: DraftCache
                ) -> Tensor:
        """The output for one pair each of E sequences, [E, hidden], whose pair is written at `rows` [E] of block_tables [E, B];
        those from row 1 on up to it are there. embeds, hidden [E, hidden]; before [E, 3] positions."""
        size, attention = cache.kv.shape[3], self.layer.self_attn
        x = self._join(embeds, hidden)
        normed, rope = self.layer.input_layernorm(x), self.rotary(before, x.dtype)
        blocks = block_tables.gather(1, (rows // size)[:, None])[:, 0].long()
        attention.store(normed, rope, blocks * size + rows % size, cache)
        result: Tensor = self.norm(self.layer(x + attention.decode(normed, rope, block_tables, rows, cache, first_row=1)))
        return result

    def _join(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        joined: Tensor = self.fc(torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)), -1))
        return joined
