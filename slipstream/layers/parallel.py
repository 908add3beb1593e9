"""What the ranks of a replica say to each other while they compute; knows no layer and no step.

Ranks of one stage sum and gather (tensor parallelism); equal tensor ranks of neighbouring stages hand hidden states on
(pipeline parallelism). Every rank makes the calls of a step in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from slipstream.sharding import Geometry, Shard


class Communicator(Protocol):
    """One rank's side."""

    shard: Shard

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the stage's tensor ranks; `x` may be overwritten."""

    def gather(self, x: Tensor) -> Tensor | None:
        """`x` of each tensor rank, all of one shape, joined along the last axis on tensor rank 0; None elsewhere."""

    def broadcast(self, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What tensor rank 0 of the stage gives as `x`; the others give None."""

    def send(self, x: Tensor) -> None:
        """To the same tensor rank of the next stage. `x` may not be changed after that."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What the same tensor rank of the stage before sends."""


class Alone:
    """The only rank of a replica."""

    def __init__(self, layers: int) -> None:
        self.shard = Shard(geometry=Geometry(stages=(layers,)))

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Communicator."""
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """See Communicator."""
        return x

    def broadcast(self, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Communicator."""
        assert x is not None
        return x

    def send(self, x: Tensor) -> None:
        """See Communicator."""
        raise AssertionError("there is no next stage")

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Communicator."""
        raise AssertionError("there is no stage before")


class Distributed:
    """Over groups of torch.distributed: gloo, or NCCL and RCCL. A rank that is lost, or silent for the groups' timeout, raises
    RuntimeError on the others."""

    def __init__(self, shard: Shard, stage: dist.ProcessGroup, chain: dist.ProcessGroup, device: torch.device) -> None:
        """`stage`: the tensor ranks of this rank's stage, in order; `chain`: the ranks of equal tensor rank, by stage."""
        self.shard = shard
        self._stage, self._chain, self._device = stage, chain, device
        self._sending: dist.Work | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Communicator. gloo sums in float32: its bfloat16 would be rounded once a rank."""
        if self.shard.tp == 1 or not x.numel():
            return x
        total = (x.float() if x.device.type == "cpu" else x).contiguous()
        self._stage.allreduce([total]).wait()
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor | None:
        """See Communicator."""
        if self.shard.tp == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.tp)] if self.shard.tp_rank == 0 else []
        if x.numel():
            self._stage.gather([parts] if parts else [], [x]).wait()
        return torch.cat(parts, -1) if parts else None

    def broadcast(self, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Communicator."""
        whole = torch.empty(shape, dtype=dtype, device=self._device) if x is None else x.contiguous()
        if self.shard.tp > 1 and whole.numel():
            self._stage.broadcast([whole]).wait()
        return whole

    def send(self, x: Tensor) -> None:
        """See Communicator. Returns when the message before this one is on its way, so that a stage may be one step ahead."""
        if self._sending is not None:
            self._sending.wait()
        self._sending = self._chain.send([x.contiguous()], self.shard.stage + 1, 0)

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Communicator."""
        x = torch.empty(shape, dtype=dtype, device=self._device)
        self._chain.recv([x], self.shard.stage - 1, 0).wait()
        return x


def connect(shard: Shard, store: Store, device: torch.device, timeout: timedelta, *, address: str = "127.0.0.1") -> Distributed:
    """Meet the other ranks of the replica at `store`. Blocks until all are there; raises RuntimeError when they are not within
    `timeout`, which is also that of every later call. `address`: of this machine, as the other ranks reach it."""
    stage = _group(f"stage {shard.stage}", store, shard.tp_rank, shard.tp, device, timeout, address)
    chain = _group(f"chain {shard.tp_rank}", store, shard.stage, shard.geometry.pp, device, timeout, address)
    return Distributed(shard, stage, chain, device)


def _group(name: str, store: Store, rank: int, size: int, device: torch.device, timeout: timedelta, address: str) -> Any:
    """A dist.ProcessGroup. Not torch's default one, nor a part of it: those are of the whole process, and gloo's guess at its
    address is the host's name, which need not be one that others reach."""
    torch_groups: Any = dist  # its stubs leave these classes out
    own = torch_groups.PrefixStore(name, store)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        options = torch_groups.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch_groups.ProcessGroupNCCL(own, rank, size, options)
    options = torch_groups.ProcessGroupGloo._Options()
    options._devices = [torch_groups.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return torch_groups.ProcessGroupGloo(own, rank, size, options)
