"""What a worker says of itself where its settings switch something off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.config import Config, EngineConfig
from slipstream.types import EngineLoad, Role
from tests.unit.test_worker_session import ScriptedRole
from worker.replica import Replica
from worker.service import Identity, WorkerService

LOAD = EngineLoad(waiting=0, running=0, parked=0, free_blocks=8, total_blocks=8, free_state_slots=0, total_state_slots=0)


@pytest.mark.parametrize(("role", "hybrid", "engine", "prefix"), [
    (Role.PREFILL, True, {}, 32), (Role.PREFILL, True, {"state_snapshots": 0}, 0),
    (Role.PREFILL, False, {"state_snapshots": 0}, 32), (Role.DECODE, True, {"state_snapshots": 0}, 32),
    (Role.DECODE, True, {"prefix_cache": False}, 0)])
async def test_a_cache_that_can_find_nothing_is_reported_as_off(role: Role, hybrid: bool, engine: dict[str, Any], prefix: int
                                                                ) -> None:
    """A hybrid prompt goes on only from a snapshot of its states; decode gets them sent (HY-08, HY-20)."""
    replica = SimpleNamespace(capacity=LOAD, config=Config(engine=EngineConfig(block_size=32, **engine)), model_name="m",
                              checkpoint=SimpleNamespace(has_linear_layers=hybrid), device="cpu", dtype="float32",
                              max_context=9)
    service = WorkerService(Identity(replica_id="w", epoch=1, role=role), cast(Replica, replica), ScriptedRole())
    told = service._fixed_fields()
    assert (told["block_size"], told["min_cacheable_prefix"]) == ("32", str(prefix))
