"""The lease of a deployment, and places whose actor is lost: what must hold while two supervisors, or two epochs, overlap."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import placement, takeover
from launch.members import members
from launch.placement import Place
from launch.takeover import LEASE_SECONDS, Claim, Lease
from slipstream import config
from slipstream.errors import LaunchError, PlacementError


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2 * LEASE_SECONDS), st.integers(1, 9)), max_size=30))
def test_a_lease_changes_hands_only_after_silence_and_forgets_no_epoch(steps: list[tuple[str, float, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now = 1000.0
        patch.setattr(time, "monotonic", lambda: now)
        lease, owner, told, epochs = Lease(), "", -1e9, dict[str, int]()
        for who, pause, epoch in steps:
            now += pause
            if who == owner or now - told > LEASE_SECONDS:
                owner, told, epochs = who, now, epochs | {f"decode-{epoch}": epoch}
            assert lease.take(who, {f"decode-{epoch}": epoch}) == (owner, told, epochs)


class Actor:
    """Stands for the lease's actor: the real Lease, asked as Ray asks; `lost` as when the actor has ended."""

    def __init__(self) -> None:
        self.lease, self.lost = Lease(), False
        self.take = self

    async def remote(self, owner: str, epochs: Mapping[str, int]) -> tuple[str, float, dict[str, int]]:
        if self.lost:
            raise RuntimeError("no such actor")
        return self.lease.take(owner, dict(epochs))


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    made = Actor()
    monkeypatch.setattr(takeover, "_lease", lambda: made)
    monkeypatch.setattr(takeover, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(takeover, "RENEW_SECONDS", 0.05)
    return made


async def test_the_next_claim_waits_for_the_end_of_the_last_and_knows_its_epochs(actor: Actor) -> None:
    first, second = Claim("d"), Claim("d")
    await first.take()
    first.epochs["decode-0"] = 7
    keeping = asyncio.create_task(first.keep())
    with pytest.raises(LaunchError, match="deployment d of this cluster is kept by another supervisor"):
        await second.take()
    assert not second.held
    keeping.cancel()  # as if it were killed, or slept
    await second.take()
    assert (second.held, second.epochs) == (True, {"decode-0": 7})
    assert not await first.renew(), "woken up, it finds out before it does anything"
    await asyncio.wait_for(first.keep(), 5)
    second.epochs["decode-0"] = 9
    assert await second.renew()
    actor.lost = True
    assert await second.renew(), "nobody can say now"
    actor.lost, actor.lease = False, Lease()  # started again elsewhere, it knows nothing
    assert await second.renew()
    assert actor.lease.take("x", {})[2] == {"decode-0": 9}


async def test_a_cluster_that_starts_no_lease_is_named(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "TAKE_SECONDS", 0.2)
    actor.lost = True
    with pytest.raises(LaunchError, match="did not start the lease of deployment d"):
        await Claim("d").take()


class SilentHost:
    """An actor on a node that answers no more; before that, as often as `answers` is set, that there is no news."""

    def __init__(self) -> None:
        self.end = self.wait = self
        self.answers = asyncio.Event()

    async def remote(self, *_: object) -> None:
        await self.answers.wait()
        self.answers.clear()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "kill", found.append)
    monkeypatch.setattr(placement, "ANSWER_SECONDS", 0.2)
    return found


async def test_giving_up_an_epoch_leaves_the_next_one_alone(killed: list[Any]) -> None:
    old, new = SilentHost(), SilentHost()
    place = Place(members(config.load(None))[0], None, lifetime=None, host=old)  # type: ignore[arg-type]
    ending = asyncio.create_task(place.end())
    await asyncio.sleep(0)
    place._host = new  # Ray had told the keeper that the node is lost, and a new host was started
    await ending
    assert killed == []
    await place.end()
    assert killed == [new]


async def test_waiting_for_a_process_survives_the_end_of_its_actor(killed: list[Any]) -> None:
    host = SilentHost()
    place = Place(members(config.load(None))[0], None, lifetime=None, host=host)  # type: ignore[arg-type]
    waiting = asyncio.create_task(place.wait())
    await asyncio.sleep(0)
    host.answers.set()
    place.kill()
    await asyncio.sleep(0.01)
    assert not waiting.done(), "it asks the actor that it knows, and hears from Ray that this one is lost"
    waiting.cancel()


@pytest.mark.parametrize(("code", "message"), [
    ("import sys; print('noise'); print(3)", ""), ("raise ImportError('libroc.so')", "cannot say .*: ImportError: libroc.so"),
    ("import os; os._exit(7)", "cannot say .*: it ended with status 7"),
    ("import time; time.sleep(60)", "did not say within 0.5"),
])
def test_how_many_gpus_there_are(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run([sys.executable, "-c", code], **options))
    if not message:
        assert placement.gpus_here() == 3
        return
    monkeypatch.setattr(placement, "GPU_SECONDS", 0.5)
    with pytest.raises(PlacementError, match=message):
        placement.gpus_here()
