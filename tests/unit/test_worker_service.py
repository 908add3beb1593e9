"""What a worker's service hears of its engine: that it lives, and what it is like, in the engine's order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.types import EngineCounters, EngineLoad, Role
from tests.unit.test_worker_session import ScriptedRole
from worker import service as service_module
from worker.replica import Replica
from worker.service import Identity, WorkerService

LOAD = EngineLoad(waiting=0, running=0, parked=0, free_blocks=1, total_blocks=1, free_state_slots=0, total_state_slots=0)


def serving(call: Callable[[Any], Any]) -> WorkerService:
    replica = cast(Replica, SimpleNamespace(capacity=LOAD, call=call))
    return WorkerService(Identity(replica_id="x", epoch=1, role=Role.PREFILL), replica, ScriptedRole())


async def test_an_engine_that_hangs_is_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LOAD_SECONDS", 0.01)
    monkeypatch.setattr(service_module, "STUCK_SECONDS", 0.2)
    answers = asyncio.Event()
    answers.set()

    async def call(fn: object) -> None:
        await answers.wait()

    service = serving(call)
    pulse = asyncio.create_task(service._beat())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(service.dead.wait(), 0.5)
    answers.clear()
    await asyncio.wait_for(service.dead.wait(), 5)
    pulse.cancel()


async def test_what_the_engine_tells_is_heard_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that is answered while nobody waits for it is not taken for news later on."""
    monkeypatch.setattr(service_module, "LOAD_SECONDS", 0.01)
    slow, steps = asyncio.Event(), iter(range(1, 99))
    engine = SimpleNamespace(load=lambda: LOAD, counters=lambda: EngineCounters(steps=next(steps)), cache_changes=lambda: None,
                             check_integrity=lambda: None)

    async def call(fn: Callable[[Any], None]) -> None:
        fn(engine)
        await slow.wait()

    service = serving(call)
    heard: list[int] = []
    monkeypatch.setattr(service, "_heard", lambda load, counters, cache: heard.append(counters.steps))
    await service._look()
    proving = asyncio.create_task(service._prove())
    await asyncio.sleep(0)
    slow.set()
    await proving
    await service._look()
    assert heard == [1, 2]
