"""The demo model and tiny ones, cut every way that a replica may be: logits, greedy tokens and caches of the whole model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import checkpoint as checkpoints
from slipstream import sharding
from slipstream.checkpoint import Checkpoint
from slipstream.errors import ConfigError
from slipstream.layers.parallel import Communicator
from slipstream.models import registry
from slipstream.models.qwen import CausalLM
from slipstream.sharding import Geometry, Shard
from tests.support import ranks, tiny
from tests.support.plain import Plain
from tests.support.rank_child import PICTURE

CHUNK, STEPS = 23, 8
GEOMETRIES = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 3)]
SEED = 1  # with 0, one token's second and third expert are equally likely to the last bit: any order of a sum may choose either
TINY = ("qwen3", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_tied_vl", "qwen3_moe_vl", "qwen3_moe_mixed",
        "qwen3_next", "qwen3_5_moe_vl")


class Case:
    """A checkpoint, a prompt (with a picture if the model sees), and what the whole model does with it."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.checkpoint: Checkpoint = checkpoints.read(folder)
        words = [int(token) for token in np.random.default_rng(3).integers(0, 490, 30)]
        start, image, end = (self.checkpoint.vision_start_token_id, self.checkpoint.image_token_id,
                             self.checkpoint.vision_end_token_id)
        self.pixels = [PICTURE] if start and image and end else []
        self.tokens = [*words, start, *[image] * (3 * 7), end, *words[:9]] if start and image and end else words + words[::-1]
        self.plain = Plain(model=self.load(), checkpoint=self.checkpoint)
        prompt = self.plain.prefill(self.tokens, self.pixels, chunk=CHUNK)
        self.steps: list[int] = []
        rows = [prompt]
        for _ in range(STEPS):
            self.steps.append(int(rows[-1][-1].argmax()))
            rows.append(self.plain.decode(self.steps[-1])[None])
        self.logits = torch.cat(rows)

    def load(self, comm: Communicator | None = None) -> CausalLM:
        return registry.load(self.checkpoint, dtype=torch.float32, device=torch.device("cpu"), comm=comm)

    def compute(self, comm: Communicator, model: CausalLM | None = None) -> tuple[Tensor, Plain]:
        """One rank's logits and caches; it is fed the whole model's tokens, which must also be its own choice."""
        plain = Plain(model=model or self.load(comm), checkpoint=self.checkpoint)
        prompt = plain.prefill(self.tokens, self.pixels, chunk=CHUNK)
        return torch.cat([prompt, *(plain.decode(token)[None] for token in self.steps)]), plain

    def check(self, logits: Tensor) -> None:
        """Equal logits, equal greedy tokens."""
        assert float((logits - self.logits).abs().max()) < 1e-4 * float(self.logits.abs().max())
        assert logits[-STEPS - 1 : -1].argmax(-1).tolist() == self.steps


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    written = {name: tiny.write(name, tmp_path_factory.mktemp(name), SEED) for name in TINY}
    return {name: Case(folder) for name, folder in {"demo": checkpoints.DEMO, **written}.items()}


@pytest.mark.parametrize(("tp", "pp"), GEOMETRIES)
@pytest.mark.parametrize("name", ["demo", *TINY])
def test_every_geometry_computes_what_the_whole_model_does(cases: dict[str, Case], name: str, tp: int, pp: int) -> None:
    case = cases[name]
    geometry = sharding.plan(case.checkpoint, tp=tp, pp=pp)
    for rank, (logits, plain) in enumerate(ranks.run(geometry, case.compute)):
        shard = Shard(geometry=geometry, rank=rank)
        if rank == geometry.world - tp:
            case.check(logits)
        assert len(plain.caches) == len(shard.layers)
        for index, cache in zip(shard.layers, plain.caches, strict=True):
            parts = ranks.part_of(case.plain.caches[index], case.checkpoint.layers[index], shard)
            for ours, theirs in zip(ranks.tensors_of(cache), parts, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2)])
@pytest.mark.parametrize("name", ["qwen3_moe_vl", "qwen3_moe_mixed", "qwen3_next", "qwen3_5_moe_vl"])
def test_whole_experts_on_each_rank(cases: dict[str, Case], name: str, tp: int, pp: int) -> None:
    case = cases[name]
    if tp == 8:
        with pytest.raises(ConfigError, match=r"experts and intermediate sizes .*legal: 1, 2, 4"):
            sharding.plan(case.checkpoint, tp=tp, pp=pp, expert_parallel=True)
        return
    geometry = sharding.plan(case.checkpoint, tp=tp, pp=pp, expert_parallel=True)

    def compute(comm: Communicator) -> tuple[Tensor, list[int]]:
        model = case.load(comm)
        held = [len(each) for key, each in model.named_parameters() if ".experts." in key]
        return case.compute(comm, model)[0], held

    found = ranks.run(geometry, compute)
    case.check(found[geometry.world - tp][0])
    assert {count for _, held in found for count in held} == {8 // tp}


def test_a_swapped_head_would_be_seen(cases: dict[str, Case]) -> None:
    """The comparison above fails where tensor ranks take each other's part: shown by doing it."""
    case, geometry = cases["demo"], Geometry(tp=2, stages=(8,))

    def swapped(comm: Communicator) -> Tensor:
        model = case.load(comm)
        keys = model.get_parameter("model.layers.3.self_attn.k_proj.weight")
        keys.copy_(comm.all_reduce(keys) - keys)
        return case.compute(comm, model)[0]

    logits = ranks.run(geometry, swapped)[0]
    with pytest.raises(AssertionError):
        case.check(logits)


def test_ranks_that_are_processes(cases: dict[str, Case], tmp_path: Path) -> None:
    """TP 2 x PP 2 over gloo; then rank 1 goes without a word, and the two that wait for it know at once."""
    case = cases["demo"]
    task: dict[str, Any] = {
        "folder": str(case.checkpoint.path), "out": str(tmp_path / "rank"), "store": str(tmp_path / "store"), "tp": 2,
        "stages": [5, 3], "tokens": case.tokens, "chunk": CHUNK, "steps": case.steps}
    children = [subprocess.Popen([sys.executable, "-m", "tests.support.rank_child", json.dumps(task | {"rank": rank})],
                                 stderr=subprocess.PIPE, text=True) for rank in range(4)]
    try:
        for child in children:
            _, errors = child.communicate(timeout=90)
            assert child.returncode == 0, errors
    finally:
        for child in children:
            child.kill()
    found = [torch.load(f"{task['out']}.{rank}", weights_only=True) for rank in range(4)]
    case.check(found[2])
    assert [logits.numel() for logits in (found[0], found[1], found[3])] == [0, 0, 0]
    for rank in (0, 3):
        assert float(Path(f"{task['out']}.lost.{rank}").read_text()) < 5
