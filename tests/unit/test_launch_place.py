"""The actors of a member's processes: how a replica of several ranks ends, and what must hold while two epochs overlap."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from launch import placement
from launch.members import Member, members
from launch.placement import Place
from slipstream import config
from slipstream.errors import LaunchError

ray = pytest.importorskip("ray")


def member(ranks: int) -> Member:
    return members(config.load(None, [f"pools.prefill.tp={ranks}", "pools.prefill.role=prefill"]))[0]


def place_of(*hosts: Any) -> Place:
    return Place(member(len(hosts)), None, lifetime=None, hosts=hosts)  # type: ignore[arg-type]


async def never() -> bool:
    raise AssertionError("rank 0's actor can be reached")


class Call:
    """One method of an actor, asked as Ray asks."""

    def __init__(self, action: Any) -> None:
        self.remote = action


class Host:
    """Stands for an actor and its process: `status` is set when that ends; SIGKILL ends it, SIGTERM if `orderly`."""

    def __init__(self, *, orderly: bool = True, answers: bool = True) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.orderly, self.answers, self.lost = orderly, answers, False
        self.wait, self.end, self.stop = Call(self._wait), Call(self._end), Call(self._stop)

    async def _wait(self, seconds: float) -> int | None:
        await asyncio.sleep(0)
        if self.lost:
            raise ray.exceptions.RayActorError
        done, _ = await asyncio.wait({self.status}, timeout=seconds)
        return self.status.result() if done else None

    async def _end(self) -> None:
        if not self.answers:
            await asyncio.Event().wait()
        self.ends(-9)

    async def _stop(self, grace_seconds: float) -> int:
        self.ends(0 if self.orderly and grace_seconds else -9)
        return self.status.result()

    def ends(self, status: int) -> None:
        if not self.status.done():
            self.status.set_result(status)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(ray, "kill", found.append)
    monkeypatch.setattr(placement, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(placement, "GANG_END_SECONDS", 0.2)
    monkeypatch.setattr(placement, "RETRY_SECONDS", 0.01)
    return found


async def test_giving_up_an_epoch_leaves_the_next_one_alone(killed: list[Any]) -> None:
    old, new = Host(answers=False), Host(answers=False)
    place = place_of(old)
    ending = asyncio.create_task(place.end())
    await asyncio.sleep(0)
    place._hosts = [new]  # Ray had told the keeper that the node is lost, and a new host was started
    await ending
    assert killed == []
    await place.end()
    assert killed == [new]


async def test_waiting_for_a_process_survives_the_end_of_its_actor(killed: list[Any]) -> None:
    host = Host()
    place = place_of(host)
    waiting = asyncio.create_task(place.wait(never))
    await asyncio.sleep(0.01)
    place.kill()
    await asyncio.sleep(0.01)
    assert (waiting.done(), killed) == (False, [host]), "it asks the actor that it knows, and hears that this one is lost"
    waiting.cancel()


async def test_one_rank_that_ends_is_the_end_of_all_and_is_named(killed: list[Any]) -> None:
    hosts = [Host() for _ in range(4)]
    place = place_of(*hosts)
    waiting = asyncio.create_task(place.wait(never))
    await asyncio.sleep(0.01)
    hosts[0].ends(1)  # because of rank 2, whose status comes later
    hosts[2].ends(-11)
    hosts[1].ends(1)
    assert await asyncio.wait_for(waiting, 5) == "signal SIGSEGV of rank 2"
    assert hosts[3].status.result() == -9, "it did not end by itself"


async def test_a_lost_actor_of_another_rank_is_the_end_only_when_rank_0_says_so(killed: list[Any]) -> None:
    hosts = [Host(), Host(answers=False)]
    hosts[1].lost = True
    waiting = asyncio.create_task(place_of(*hosts).wait(never))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    hosts[0].ends(1)
    assert await asyncio.wait_for(waiting, 5) == "status 1 of rank 0"
    assert killed == [hosts[1]]


async def test_a_lost_rank_0_that_answers_no_probe_is_the_end_of_all(killed: list[Any]) -> None:
    hosts = [Host(), Host()]
    hosts[0].lost = True
    answers = [False, False, True]

    async def gone() -> bool:
        return answers.pop(0)

    with pytest.raises(LaunchError, match="prefill-0 lost its Ray actor"):
        await asyncio.wait_for(place_of(*hosts).wait(gone), 5)
    assert (answers, hosts[1].status.result()) == ([], -9)


@pytest.mark.parametrize(("late", "status"), [(False, 0), (True, -9)])
async def test_rank_0_drains_and_ends_the_others(killed: list[Any], late: bool, status: int) -> None:
    hosts = [Host(), Host()]
    place = place_of(*hosts)
    if not late:
        hosts[0].status.add_done_callback(lambda _: hosts[1].ends(0))
    assert await place.stop(5.0) == status
    assert [host.status.result() for host in hosts] == [0, status]
