"""A mixture of experts in place of an MLP; knows no layout on disk.

Every tensor rank routes every token alike and holds its own channels of every expert, or, with `expert_parallel`, its own
experts.
"""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.checkpoint import ExpertConfig
from slipstream.kernels.dispatch import Kernels
from slipstream.layers.linear import ColumnLinear, Cut, Stack
from slipstream.layers.mlp import GatedMLP
from slipstream.layers.parallel import Communicator


class Experts(nn.Module):
    """The weights of the rank's routed experts, as one grouped product takes them."""

    def __init__(self, hidden: int, config: ExpertConfig, comm: Communicator) -> None:
        super().__init__()
        apart = comm.shard.geometry.expert_parallel
        experts = Cut.heads(config.count, comm.shard) if apart else Cut.all(config.count)
        channels = Cut.all(config.intermediate_size) if apart else Cut.heads(config.intermediate_size, comm.shard)
        self.own = experts.ranges[0] if apart else None
        self.gate_up_proj = Stack.empty(experts, hidden, 1, {"gate_proj": channels, "up_proj": channels})
        self.down_proj = Stack.empty(experts, hidden, 2, {"down_proj": channels})

    def places(self, chosen: Tensor) -> Tensor:
        """Experts' numbers -> their places in the weights; those of other ranks come behind the last."""
        if self.own is None:
            return chosen
        place = chosen - self.own.start
        return place.masked_fill((place < 0) | (place >= len(self.own)), len(self.own))


class SparseMLP(nn.Module):
    """The likeliest experts of each token, and the shared expert behind its own sigmoid gate where there is one."""

    def __init__(self, kernels: Kernels, hidden: int, config: ExpertConfig, comm: Communicator) -> None:
        super().__init__()
        self.kernels, self.config, self.comm = kernels, config, comm
        self.gate = ColumnLinear(hidden, Cut.all(config.count))
        self.experts = Experts(hidden, config, comm)
        self.shared_expert = GatedMLP(kernels, hidden, config.shared_size, comm) if config.shared_size else None
        self.shared_expert_gate = ColumnLinear(hidden, Cut.all(1)) if config.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> the same; both kinds of expert share one sum over the ranks."""
        chosen, weights = self.kernels.top_experts(self.gate(x), self.config.top_k, self.config.normalise)
        chosen = self.experts.places(chosen)
        out = self.kernels.experts(x, self.experts.gate_up_proj, self.experts.down_proj, chosen, weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert.summand(x)
        return self.comm.all_reduce(out)
