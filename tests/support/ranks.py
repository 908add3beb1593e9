"""All ranks of a replica in one process, one thread each, and what each of them must hold of a whole model's caches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.engine.caches import states_of
from slipstream.layers.batch import AttentionCache, LayerCache, LinearCache
from slipstream.layers.parallel import Communicator
from slipstream.sharding import Geometry, Shard, heads_of
from slipstream.types import AttentionLayer, LayerSpec

T = TypeVar("T")
DEADLINE_SECONDS = 60.0


class Thread:
    """A Communicator among threads: `tables[stage]` is where the tensor ranks of a stage lay down what they give."""

    def __init__(self, shard: Shard, barriers: list[threading.Barrier], tables: list[list[Tensor | None]],
                 lines: dict[int, queue.Queue[Tensor]]) -> None:
        self.shard = shard
        self._barrier, self._table, self._lines = barriers[shard.stage], tables[shard.stage], lines

    def _exchange(self, x: Tensor | None) -> list[Tensor | None]:
        self._table[self.shard.tp_rank] = x
        self._barrier.wait(DEADLINE_SECONDS)
        found = list(self._table)
        self._barrier.wait(DEADLINE_SECONDS)
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Communicator."""
        return torch.stack([part for part in self._exchange(x.clone()) if part is not None]).sum(0)

    def gather(self, x: Tensor) -> Tensor | None:
        """See Communicator."""
        parts = [part for part in self._exchange(x) if part is not None]
        assert len({part.shape for part in parts}) == 1
        return torch.cat(parts, -1) if self.shard.tp_rank == 0 else None

    def broadcast(self, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Communicator."""
        assert (x is None) == (self.shard.tp_rank > 0)
        return self._checked(self._exchange(x)[0], shape, dtype)

    def send(self, x: Tensor) -> None:
        """See Communicator."""
        self._lines[self.shard.rank + self.shard.tp].put(x.clone())

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Communicator."""
        return self._checked(self._lines[self.shard.rank].get(timeout=DEADLINE_SECONDS), shape, dtype)

    def _checked(self, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert x is not None
        assert (tuple(x.shape), x.dtype) == (tuple(shape), dtype)
        return x


def run(geometry: Geometry, work: Callable[[Communicator], T]) -> list[T]:
    """What `work` returns on each rank; the first failure is raised, and ends the others."""
    barriers = [threading.Barrier(geometry.tp) for _ in geometry.stages]
    tables: list[list[Tensor | None]] = [[None] * geometry.tp for _ in geometry.stages]
    lines: dict[int, queue.Queue[Tensor]] = {rank: queue.Queue() for rank in range(geometry.world)}
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(Thread(Shard(geometry=geometry, rank=rank), barriers, tables, lines))
        except BaseException as error:
            failures.append(error)
            for barrier in barriers:
                barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(geometry.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS if not failures else 1.0)
    if failures:
        raise failures[0]
    assert all(line.empty() for line in lines.values()), "something was sent that nobody took"
    return [results[rank] for rank in range(geometry.world)]


def part_of(cache: LayerCache, layer: LayerSpec, shard: Shard) -> list[Tensor]:
    """What a rank must hold of one layer's whole cache."""
    if isinstance(layer, AttentionLayer):
        assert isinstance(cache, AttentionCache)
        return [cache.kv[:, list(heads_of(layer.kv_heads, shard.tp, shard.tp_rank))], *states_of(cache).values()]
    assert isinstance(cache, LinearCache)
    keys, values = (list(heads_of(heads, shard.tp, shard.tp_rank)) for heads in (layer.key_heads, layer.value_heads))
    q, k, v = (segment.contiguous() for segment in torch.split(cache.conv, list(layer.conv_segments), 1))
    parts = [segment.view(len(segment), -1, size, segment.shape[-1])[:, own].flatten(1, 2)
             for segment, size, own in ((q, layer.key_head_size, keys), (k, layer.key_head_size, keys),
                                        (v, layer.value_head_size, values))]
    return [torch.cat(parts, 1), cache.recurrent[:, values]]


def tensors_of(cache: LayerCache) -> list[Tensor]:
    """The tensors of one layer's cache."""
    return [*([cache.kv] if isinstance(cache, AttentionCache) else []), *states_of(cache).values()]
