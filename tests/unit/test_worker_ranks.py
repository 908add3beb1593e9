"""Which rank a process is told to be, and what all ranks of a replica must have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slipstream import checkpoint as checkpoints
from slipstream.checkpoint import DEMO
from slipstream.config import Config, EngineConfig, PoolConfig
from slipstream.errors import ConfigError
from slipstream.types import Role
from worker import ranks
from worker.replica import cache_layout, fingerprint

MASTER = "127.0.0.1:4000"


def place(cut: dict[str, Any], **said: Any) -> ranks.Place | None:
    config = Config(pools={"prefill": PoolConfig(role=Role.PREFILL, **cut), "decode": PoolConfig(role=Role.DECODE)})
    defaults: dict[str, Any] = {"pool": "", "rank": 0, "world": 0, "master": MASTER, "epoch": 1}
    return ranks.place(config, Role.PREFILL, **defaults | said)


def test_a_rank_knows_its_place() -> None:
    found = place({"tp": 2, "pp": 3, "stages": (3, 4, 1)}, rank=3, world=6, master="[fd00::7]:4000", epoch=5)
    assert found is not None
    assert (found.shard.geometry.stages, found.shard.stage, found.shard.tp_rank) == ((3, 4, 1), 1, 1)
    assert (found.master, found.epoch) == (("fd00::7", 4000), 5)
    for alone in ({}, {"stages": (8,)}):
        assert place(alone, master="") is None
        assert place(alone, world=1) is None


@pytest.mark.parametrize(("cut", "said", "words"), [
    ({"tp": 3}, {}, "tp 3 does not cut .* legal: 1, 2, 4"),
    ({"tp": 2, "expert_parallel": True}, {}, "has no experts"),
    ({"pp": 9}, {}, "pp must be 1 to 8"),
    ({"pp": 2, "stages": (3, 3)}, {}, "must be 2 positive numbers of layers, 8 together"),
    ({"stages": (3, 5)}, {"master": ""}, "must be 1 positive numbers of layers"),
    ({"tp": 2}, {"rank": 2}, "rank 2 of 2: .* 2 ranks"),
    ({"tp": 2}, {"rank": -1}, "rank -1 of 2"),
    ({"tp": 2}, {"rank": 1, "world": 3}, "rank 1 of 3"),
    ({}, {"rank": 1}, "rank 1 of 1"),
    ({}, {"world": 2}, "rank 0 of 2"),
    ({"tp": 2}, {"master": ""}, "a replica of 2 ranks needs --master HOST:PORT"),
    ({"tp": 2}, {"master": "host"}, "needs --master HOST:PORT"),
    ({"tp": 2}, {"master": ":4000"}, "needs --master HOST:PORT"),
    ({"tp": 2}, {"master": "host:99999"}, "needs --master HOST:PORT"),
    ({"tp": 2}, {"master": "host:0"}, "port 0 would be another one on each rank"),
    ({}, {"pool": "other"}, "there is no pool 'other'; pools: prefill, decode"),
    ({}, {"pool": "decode"}, "pool decode is for decode, not for prefill"),
])
def test_what_does_not_fit_is_refused_at_once(cut: dict[str, Any], said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place(cut, **said)


def test_ranks_of_another_role_model_or_memory_do_not_join() -> None:
    config, checkpoint = Config(), checkpoints.read(DEMO)
    layout = cache_layout(config, checkpoint, "demo", "float32")
    said = {fingerprint(Role.PREFILL, layout, config), fingerprint(Role.DECODE, layout, config),
            fingerprint(Role.PREFILL, cache_layout(config, checkpoint, "demo", "bfloat16"), config),
            fingerprint(Role.PREFILL, layout, dataclasses.replace(config, engine=EngineConfig(max_running=3)))}
    assert len(said) == 4
