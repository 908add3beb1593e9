"""One request's actions on links that break between two decisions; the links are the test's own, all else is real."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from router.breaker import Breakers
from router.dispatch import Row
from router.generate import Generation
from router.link import LegSink
from router.policy import Replica
from router.prompt import Prompt
from router.request import Bounds, GenerateRequest, Times
from router.routing import Routing
from router.workers import Workers
from slipstream import checkpoint
from slipstream.checkpoint import DEMO
from slipstream.config import RouterConfig
from slipstream.errors import BusyError, UnavailableError
from slipstream.observability.metrics import RouterMetrics
from slipstream.types import Role, SamplingParams, StopParams
from slipstream.v1 import worker_pb2

P, D = Role.PREFILL, Role.DECODE


class Links:
    """Four replicas; `heard` is what each was told, in order."""

    def __init__(self) -> None:
        self.roles = {"p0": P, "p1": P, "d0": D, "d1": D}
        self.heard: dict[str, list[str]] = {name: [] for name in self.roles}
        self.sinks: dict[str, LegSink] = {}
        self.deaf: set[str] = set()
        self.refusing: set[str] = set()
        """Both are seen by the policy; the first are lost, the others take no Submit."""
        self.breakers = Breakers(0, 0.0, lambda role: None)

    def views(self) -> list[Replica]:
        return [Replica(id=name, role=role, compatibility_hash="same") for name, role in self.roles.items()]

    def link(self, name: str) -> Link:
        return Link(self, name)

    async def change(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def used(self, role: Role) -> list[str]:
        return [name for name, heard in self.heard.items() if heard and self.roles[name] is role]


class Link:
    def __init__(self, links: Links, name: str) -> None:
        self.links, self.name = links, name

    def connected(self) -> worker_pb2.WorkerInfo:
        if self.name in self.links.deaf:
            raise UnavailableError(f"{self.name} is not connected")
        return worker_pb2.WorkerInfo(cache_store_addresses=[self.name])

    def submit(self, message: worker_pb2.Submit, sink: LegSink, tokens: int) -> None:
        if self.name in self.links.refusing:
            raise UnavailableError(f"{self.name} takes nothing")
        self.links.sinks[self.name] = sink
        self.links.heard[self.name].append(f"submit {message.request_id} {message.attempt}")

    def cancel(self, handle: int, attempt: int) -> None:
        self.links.heard[self.name].append(f"cancel {handle} {attempt}")


def generation(links: Links, max_resumes: int, choices: int = 1) -> Generation:
    request = GenerateRequest(id="r", prompt=Prompt(tokens=(1, 2), field="prompt"), deadline=time.monotonic() + 10,
                              sampling=SamplingParams(temperature=0, seed=1), stop=StopParams(max_tokens=4), choices=choices)
    numbers: Callable[[], int] = partial(next, itertools.count(1))
    metrics = RouterMetrics(CollectorRegistry())
    routing = Routing(RouterConfig(), checkpoint.read(DEMO), metrics)
    return Generation(request, cast(Workers, cast(Any, links)), routing, metrics, Times(arrived=0.0), numbers,
                      Bounds(unread_bytes=1000, max_resumes=max_resumes, resume_wait_seconds=0.2))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (what it waits for has no event)
            await asyncio.sleep(0.005)


async def test_a_run_that_fails_while_it_is_submitted_leaves_no_leg_behind() -> None:
    """Prefill takes nothing: the Submit to decode, decided before, must not come after the cancel that follows from it."""
    links = Links()
    links.refusing = {"p0", "p1"}
    one = generation(links, max_resumes=1)
    one.start()
    (decode,) = links.used(D)
    assert links.heard[decode] == ["submit r 0", "cancel 1 0"]
    links.refusing = set()
    await until(lambda: "submit r~1 0" in links.heard["d0"] + links.heard["d1"])
    one.close()


async def test_a_lost_prefill_link_is_named_and_avoided(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    links = Links()
    one = generation(links, max_resumes=1)
    one.start()
    (prefill,), (decode,) = links.used(P), links.used(D)
    links.deaf = {prefill}
    links.sinks[decode].on_failed(0, BusyError("full"))  # the decode replica asked next cannot be told where to load from
    await until(lambda: len(links.used(P)) == 2)
    assert one.dispatch.resumes == 1
    assert f"{prefill} is not connected" in caplog.text
    one.close()


async def test_a_choice_that_its_text_ends_while_it_waits_for_replicas_ends_no_other() -> None:
    links = Links()
    one = generation(links, max_resumes=2, choices=2)
    one.start()
    (prefill,), (decode,) = links.used(P), links.used(D)
    links.sinks[prefill].on_tokens(0, [Row(choice=choice, index=0, token=7) for choice in (0, 1)])
    links.sinks[decode].on_failed(0, UnavailableError("lost"))
    other = "p1" if prefill == "p0" else "p0"
    await until(lambda: one.dispatch.resumes == 2 and links.used(P) == ["p0", "p1"] and len(links.heard[prefill]) == 3)
    links.roles = {"d0": D, "d1": D}  # no prefill replica is left for the choice that is lost again
    links.sinks[other].on_failed(0, UnavailableError("lost"))
    one.enough(0 if "submit r~1 0" in links.heard[other] else 1)
    await asyncio.sleep(0.4)
    assert one.end is None
    one.close()
