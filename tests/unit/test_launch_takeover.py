"""The lease of a deployment: what must hold while two supervisors overlap. And what a machine has."""

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

from launch import session, takeover
from launch.takeover import LEASE_SECONDS, Claim, Lease
from slipstream.errors import LaunchError, PlacementError


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 2 * LEASE_SECONDS), st.integers(1, 9)), max_size=30))
def test_a_lease_changes_hands_only_after_silence_and_forgets_no_epoch(steps: list[tuple[str, float, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now = 1000.0
        patch.setattr(time, "monotonic", lambda: now)
        lease, owner, told, epochs, scaled = Lease(), "", -1e9, dict[str, int](), dict[str, tuple[int, int]]()
        for who, pause, epoch in steps:
            now += pause
            wish = {f"decode-{epoch}": epoch}, {"decode": (1, epoch)}
            if who == owner or now - told > LEASE_SECONDS:
                owner, told, epochs, scaled = who, now, epochs | wish[0], wish[1]
            assert lease.take(who, *wish) == (owner, told, epochs, scaled)


class Actor:
    """Stands for the lease's actor: the real Lease, asked as Ray asks; `lost` as when the actor has ended."""

    def __init__(self) -> None:
        self.lease, self.lost = Lease(), False
        self.take = self

    async def remote(self, owner: str, epochs: Mapping[str, int], scaled: Mapping[str, tuple[int, int]]) -> Any:
        if self.lost:
            raise RuntimeError("no such actor")
        return self.lease.take(owner, dict(epochs), dict(scaled))


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    made = Actor()
    monkeypatch.setattr(takeover, "_lease", lambda: made)
    monkeypatch.setattr(takeover, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(takeover, "RENEW_SECONDS", 0.05)
    return made


async def test_the_next_claim_waits_for_the_end_of_the_last_and_knows_what_it_knew(actor: Actor) -> None:
    first, second = Claim("d"), Claim("d")
    await first.take()
    first.epochs["decode-0"] = 7
    first.scaled = {"decode": (1, 3)}
    keeping = asyncio.create_task(first.keep())
    with pytest.raises(LaunchError, match="deployment d of this cluster is kept by another supervisor"):
        await second.take()
    assert not second.held
    keeping.cancel()  # as if it were killed, or slept
    await second.take()
    assert (second.held, second.epochs, second.scaled) == (True, {"decode-0": 7}, {"decode": (1, 3)})
    assert not await first.renew(), "woken up, it finds out before it does anything"
    await asyncio.wait_for(first.keep(), 5)
    second.epochs["decode-0"] = 9
    second.scaled = {"decode": (1, 2)}
    assert await second.renew()
    actor.lost = True
    assert await second.renew(), "nobody can say now"
    actor.lost, actor.lease = False, Lease()  # started again elsewhere, it knows nothing
    assert await second.renew()
    assert actor.lease.take("x", {}, {})[2:] == ({"decode-0": 9}, {"decode": (1, 2)})


async def test_a_cluster_that_starts_no_lease_is_named(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "TAKE_SECONDS", 0.2)
    actor.lost = True
    with pytest.raises(LaunchError, match="did not start the lease of deployment d"):
        await Claim("d").take()


def test_ray_is_told_how_many_gpus_there_are_and_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY-08: its own search prints errors on the other vendor's nodes, and finds none where a library is missing."""
    told: dict[str, Any] = {}

    def init(**options: Any) -> None:
        told.update(options)
        raise RuntimeError("seen")

    monkeypatch.setattr(pytest.importorskip("ray"), "init", init)
    monkeypatch.setattr("launch.processes.descendants", lambda pid: ())  # it would end what it started
    for name in ("RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "")
    for gpus in (0, 3):
        with pytest.raises(LaunchError, match="seen"):
            session.Session("", "d", cpus=4, gpus=gpus)
        assert told["num_gpus"] == gpus


@pytest.mark.parametrize(("code", "message"), [
    ("import sys; print('noise'); print(3)", ""), ("raise ImportError('libroc.so')", "cannot say .*: ImportError: libroc.so"),
    ("import os; os._exit(7)", "cannot say .*: it ended with status 7"),
    ("import time; time.sleep(60)", "did not say within 0.5"),
])
def test_how_many_gpus_there_are(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run([sys.executable, "-c", code], **options))
    if not message:
        assert session.gpus_here() == 3
        return
    monkeypatch.setattr(session, "GPU_SECONDS", 0.5)
    with pytest.raises(PlacementError, match=message):
        session.gpus_here()
