"""A whole deployment under load while three of its processes are killed or stopped: no wrong token, nothing left over.

`CHAOS_SEED` chooses who is hit when, and what is asked; a failure names it. `CHAOS_CHANNEL`: the channel that is sick.
`CHAOS_DRAFTS`: `speculative.tokens`, of a model with a random layer that drafts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import mtp
from tests.support.command import Command
from tests.support.traffic import Ask, Choice, Reply, asks, send, until_healthy
from tests.support.worker_client import pair

SEED = int(os.environ.get("CHAOS_SEED", "0"))
CHANNEL = os.environ.get("CHAOS_CHANNEL", "grpc")
DRAFTS = int(os.environ.get("CHAOS_DRAFTS", "0"))
IN_FLIGHT = 10
RECOVERY_SECONDS = 60
REPLICAS = {"prefill": 2, "decode": 2}

pytestmark = pytest.mark.deployment


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How bad it is."""

    requests: int
    leave: float
    """Share of clients that go away before the end."""
    lessons: int = 1
    """How often a right answer is asked for: a sick channel may fail a request more often than it is resumed."""
    settings: tuple[str, ...] = ()


CALM = Weather(requests=200, leave=0.1)
SICK = Weather(requests=500, leave=0.2, lessons=3, settings=(
    f"transfer.channel={CHANNEL}", f"transfer.faults.seed={SEED}", "transfer.frame_bytes=65536",
    "transfer.faults.delay_seconds=0.02",
    *(f"transfer.faults.{kind}=0.01" for kind in ("drop", "duplicate", "corrupt", "cut"))))


class Victims:
    """The processes of a deployment, as its supervisor names them; each is hit once at most."""

    def __init__(self, served: Command) -> None:
        self._served = served

    def pid(self, name: str) -> int:
        """Of its latest epoch."""
        return int(re.findall(rf"{name} serves at \S+ \(pid (\d+)", self._served.text)[-1])

    async def recovered(self, name: str) -> None:
        """Wait until its next epoch serves."""
        pattern = rf"(?s){name} ended with signal SIGKILL; starting epoch 2 .*\n[^\n]*{name} serves at"
        await asyncio.to_thread(self._served.wait_for, pattern, RECOVERY_SECONDS)


class Client:
    """Asks, and compares what comes with what is right."""

    def __init__(self, url: str, rng: random.Random, leave: float) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=90, limits=httpx.Limits(max_keepalive_connections=0))
        self._rng = rng
        self._leave = leave
        self._right: dict[str, Reply] = {}
        self.begun = 0
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self.seen = Counter[str]()

    async def learn(self, kinds: list[Ask], lessons: int) -> None:
        """What is right: known from the start, or what is answered while nothing fails."""
        room = asyncio.Semaphore(IN_FLIGHT)

        async def one(ask: Ask) -> None:
            async with room:
                for _ in range(lessons):
                    reply = await send(self._http, ask, stream=False)
                    if not reply.error:
                        break
            assert not reply.error, f"{ask.name}: {reply.error}"
            assert not ask.answer or {choice.text for choice in reply.choices} == {ask.answer}, ask.name
            self._right[ask.name] = reply

        await asyncio.gather(*(one(ask) for ask in kinds))

    async def ask(self, kinds: list[Ask]) -> None:
        """One request of any kind; some leave before the end. What was refused before it began, or lost with its router,
        is asked again, as the official client does."""
        ask, stream, leaves = self._rng.choice(kinds), self._rng.random() < 0.6, self._rng.random() < self._leave
        self.begun += 1
        for _ in range(100):
            try:
                reply = await send(self._http, ask, stream=stream or leaves, leave_after=2 if leaves else 0)
            except httpx.TransportError:  # of a router that was killed: nobody but the client can ask again
                self.seen["lost"] += 1
            else:
                if reply.choices or not reply.error.startswith("unavailable: no "):
                    break
                self.seen["refused"] += 1  # both replicas of a role are gone
            await asyncio.sleep(0.5)
        else:
            pytest.fail(f"nobody answers {ask.name}")
        self.seen["left" if leaves else "streamed" if stream else "whole"] += 1
        if reply.error:
            self.errors.append(f"{ask.name}: {reply.error}")
        right = self._right[ask.name]
        if (reply.error and reply.choices) or leaves:
            good = all(map(begins, right.choices, reply.choices))
        else:
            good = bool(reply.error) or reply == right
        if not good:
            self.wrong.append(f"{ask.name}, {stream=}, {leaves=}: {reply}\nright is {right}")

    async def get(self, path: str) -> Any:
        """Of the router."""
        return (await self._http.get(path)).raise_for_status()

    async def close(self) -> None:
        """Drop all connections."""
        await self._http.aclose()

    async def until_healthy(self) -> None:
        """See traffic.until_healthy."""
        await until_healthy(self._http, RECOVERY_SECONDS)


def begins(whole: Choice, part: Choice) -> bool:
    """True if `part` is a beginning of `whole`."""
    return whole.text.startswith(part.text) and whole.tokens[: len(part.tokens)] == part.tokens


def workers() -> list[str]:
    return sorted(f"{role}-{number}" for role, count in REPLICAS.items() for number in range(count))


def descriptors(pid: int) -> Counter[str]:
    """A process's open files by what they are."""
    kinds = Counter[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds[re.sub(r"\d+", "", os.readlink(entry))] += 1
        except FileNotFoundError:
            continue
    return kinds


@pytest.fixture
def served(weather: Weather, tmp_path: Path) -> Iterator[Command]:
    pools = [f"pools.{role}.{key}={value}" for role, count in REPLICAS.items()
             for key, value in (("role", role), ("replicas", count), ("cpus", 0.1))]
    settings = [*pools, "router.port=0", "router.cpus=0.1", "ray.unresponsive_seconds=6", f"ray.log_dir={tmp_path / 'logs'}",
                "router.worker_silence_seconds=3", "transfer.lease_seconds=5", "engine.kv_cache_tokens=6000", *weather.settings]
    if DRAFTS:
        folder = mtp.demo(tmp_path / "checkpoint")
        settings += [f"speculative.tokens={DRAFTS}", "model.served_name=demo", f"model.path={folder}"]
    command = Command(["serve", *(part for setting in settings for part in ("--set", setting))])
    yield command
    command.clean_up()


async def settled(client: Client, victims: Victims, before: dict[str, int]) -> None:
    """Wait until every worker owns nothing but its cache, and has no more files open than before the first failure."""
    async with asyncio.timeout(30):
        while True:  # a replica that has just been replaced may be listed in place of its next epoch
            replicas = (await client.get("/status")).json()["replicas"]
            if sorted(one["replica_id"] for one in replicas) == workers():
                break
            await asyncio.sleep(0.2)
    by_name = {one["replica_id"]: one["address"] for one in replicas}
    for number in range(2):
        async with pair(by_name[f"prefill-{number}"], by_name[f"decode-{number}"]) as held:
            await held.until_empty(20)
    for one in (await client.get("/status?detail=1")).json()["replicas"]:
        assert {held["owner"] for held in one["holdings"]} <= {"free", "cache"}, one
    assert "slipstream_router_in_flight 0.0" in (await client.get("/metrics")).text
    for name, count in before.items():
        async with asyncio.timeout(20):
            while (now := descriptors(victims.pid(name))).total() > count:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.5)
        print(f"{name}: {count} files open before, {now.total()} after")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("weather", [pytest.param(CALM, id="calm"), pytest.param(SICK, id="sick")])
async def test_three_failures_among_many_requests(weather: Weather, served: Command, tmp_path: Path) -> None:
    """Where the channel is sick as well, a request that failed too often may end with a typed error; none has a wrong token."""
    rng = random.Random(SEED)
    url = (await asyncio.to_thread(served.wait_for, r"ready at (http://\S+);"))[1]
    client, victims, kinds = Client(url, rng, weather.leave), Victims(served), asks()
    await client.learn(kinds, weather.lessons)
    await settled(client, victims, {})
    before = {name: descriptors(victims.pid(name)).total() for name in [*workers(), "router-0"]}

    chosen = [(name, signal.SIGKILL if name == "router-0" else rng.choice([signal.SIGKILL, signal.SIGSTOP]))
              for name in rng.sample(["router-0", *workers()], 3)]
    moments = sorted(rng.sample(range(10, weather.requests - 40), 3))
    numbers = itertools.count()
    recovering: list[asyncio.Task[None]] = []

    async def user() -> None:
        while (number := next(numbers)) < weather.requests:
            for moment, (name, what) in zip(moments, chosen, strict=True):
                if number == moment:
                    os.kill(victims.pid(name), what)
                    recovering.append(asyncio.create_task(victims.recovered(name)))
            await client.ask(kinds)

    await asyncio.gather(*(user() for _ in range(IN_FLIGHT)))
    await asyncio.gather(*recovering)
    story = (f"seed {SEED}: {list(zip(moments, chosen, strict=True))}, {dict(client.seen)}, "
             f"{len(client.errors)} of {weather.requests} ended with an error")
    print(story)
    assert not client.wrong, f"{story}\n" + "\n".join(client.wrong)
    if weather is CALM:
        assert not client.errors, f"{story}\n" + "\n".join(client.errors)
    else:
        assert len(client.errors) < weather.requests / 20, f"{story}\n" + "\n".join(client.errors)
    await client.until_healthy()
    await settled(client, victims, before)
    await client.close()
    served.signal(signal.SIGTERM)
    assert await asyncio.to_thread(served.wait) == 0, served.text
    faults = [line for path in (tmp_path / "logs").iterdir() for line in path.read_text().splitlines()
              if line.startswith("{") and "exception" in json.loads(line)]
    assert not faults
    assert served.leftovers() == []
