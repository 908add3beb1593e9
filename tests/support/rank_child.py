"""One rank of a replica as a process of its own: computes a prompt over real process groups, then sees its neighbour go.

Arguments: a JSON object with folder, out, store, tp, stages, rank, tokens, chunk, steps (tokens after the prompt).
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import FileStore

from slipstream import checkpoint as checkpoints
from slipstream.layers.parallel import Distributed, connect
from slipstream.models import registry
from slipstream.sharding import Geometry, Shard
from tests.support.plain import Plain

PICTURE = np.random.default_rng(5).integers(0, 256, (96, 224, 3), dtype=np.uint8)


def main(task: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    shard = Shard(geometry=Geometry(tp=task["tp"], stages=tuple(task["stages"])), rank=task["rank"])
    store = FileStore(task["store"], shard.geometry.world)
    comm = connect(shard, store, torch.device("cpu"), timedelta(seconds=60))
    checkpoint = checkpoints.read(Path(task["folder"]))
    model = registry.load(checkpoint, dtype=torch.float32, device=torch.device("cpu"), comm=comm)
    plain = Plain(model=model, checkpoint=checkpoint)
    logits = [plain.prefill(task["tokens"], [PICTURE], chunk=task["chunk"]), *(plain.decode(t)[None] for t in task["steps"])]
    torch.save(torch.cat(logits), f"{task['out']}.{shard.rank}")
    small_calls(comm)
    store.set(f"done {shard.rank}", "")
    if shard.rank == 1:
        store.wait(["done 3"])
        os._exit(0)  # neither its partner nor the stage behind it is told
    began = time.monotonic()
    try:
        if shard.rank == 0:
            comm.all_reduce(torch.ones(3))
        elif shard.rank == 3:
            comm.recv((3,), torch.float32)
    except RuntimeError:
        Path(f"{task['out']}.lost.{shard.rank}").write_text(str(time.monotonic() - began))


def small_calls(comm: Distributed) -> None:
    """What the model does not need on the CPU, or not here: bfloat16, integers, nothing at all."""
    own = comm.shard.tp_rank
    total = comm.all_reduce(torch.tensor([1.0, 256.0], dtype=torch.bfloat16) + own)
    assert torch.equal(total, torch.tensor([3.0, 512.0], dtype=torch.bfloat16))  # 513 rounds to even
    assert comm.all_reduce(torch.empty(0, 3)).shape == (0, 3)
    for width in (2, 0):
        joined = comm.gather(torch.full((3, width), own, dtype=torch.bfloat16))
        assert (joined is None) == (own == 1)
        assert joined is None or joined.tolist() == [[0.0] * width + [1.0] * width] * 3
    for dtype in (torch.bfloat16, torch.int64, torch.float32):
        given = torch.arange(3).to(dtype) if own == 0 else None
        assert torch.equal(comm.broadcast(given, (3,), dtype), torch.arange(3).to(dtype))
    for count in range(3):  # in order, also when the sender is ahead
        if comm.shard.first:
            comm.send(torch.full((2, 2), count, dtype=torch.bfloat16))
        else:
            assert torch.equal(comm.recv((2, 2), torch.bfloat16), torch.full((2, 2), count, dtype=torch.bfloat16))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
