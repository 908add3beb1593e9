"""What a probe makes of a process that serves, drains, cannot serve, hangs or breaks off; and what follows from probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from launch import probe
from launch.keeper import FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, STEADY_SECONDS, Keeper, next_pause
from launch.members import members
from launch.placement import Place
from launch.probe import STRIKES, Finding, count
from slipstream import config
from slipstream.rpc.security import OPEN
from slipstream.rpc.server import listen, new_server
from slipstream.v1 import worker_pb2, worker_pb2_grpc

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Worker(worker_pb2_grpc.WorkerServicer):
    draining = False

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.WorkerInfo:  # noqa: N802
        return worker_pb2.WorkerInfo(draining=self.draining)


@pytest.fixture
async def worker() -> AsyncIterator[tuple[Worker, Any, str]]:
    server, made, healthy = new_server(), Worker(), health.aio.HealthServicer()  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServicer_to_server(made, server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    yield made, healthy, await listen(server, "127.0.0.1:0")
    await server.stop(0)


async def test_a_worker_says_how_it_is(worker: tuple[Worker, Any, str]) -> None:
    made, healthy, address = worker
    ready = {"address": address}
    status = health_pb2.HealthCheckResponse
    await healthy.set("", status.SERVING)
    assert await probe.process(ready, 5) is Finding.FINE
    await healthy.set("", status.NOT_SERVING)
    assert await probe.process(ready, 5) is Finding.WRONG
    made.draining = True
    assert await probe.process(ready, 5) is Finding.FINE, "whoever drains will end by itself"


class Unreachable:
    """Stands for the actor of a process: Ray cannot reach it twice, then it says 3."""

    def __init__(self) -> None:
        self.wait, self.answers = self, [None, None, 3]

    async def remote(self, *_: object) -> int:
        if (answer := self.answers.pop(0)) is None:
            raise pytest.importorskip("ray").exceptions.RayActorError
        return answer


async def test_a_process_that_answers_has_not_ended_whatever_ray_says(worker: tuple[Worker, Any, str]) -> None:
    _, healthy, address = worker
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    for where, how in [(address, "status 3"), ("127.0.0.1:1", "an error: prefill-0 lost its Ray actor: RayActorError")]:
        place = Place(members(config.load(None))[0], None, lifetime=None, hosts=[Unreachable()])  # type: ignore[arg-type]
        keeper = Keeper(SimpleNamespace(security=OPEN), place)  # type: ignore[arg-type]
        keeper.ready = {"address": where}
        assert await keeper.ended() == how


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    writer.close()


async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"?\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("answer", [hang, break_off, babble])
@pytest.mark.parametrize("key", ["http", "address"])
async def test_whatever_else_comes_is_silence(answer: Answer, key: str) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await probe.process({key: address}, 0.3) is Finding.SILENT
    assert await probe.process({key: address}, 0.3) is Finding.SILENT, "nobody listens there now"


def test_strikes() -> None:
    silent = 0
    for _ in range(STRIKES - 1):
        silent = count(silent, Finding.SILENT)
    assert silent < STRIKES <= count(silent, Finding.SILENT)
    assert count(silent, Finding.FINE) == 0
    assert count(0, Finding.WRONG) < STRIKES <= count(count(0, Finding.WRONG), Finding.WRONG)


def test_pauses_grow_also_while_a_start_fails_long_after_the_last_good_one() -> None:
    pause, seen = next_pause(16.0, STEADY_SECONDS + 1), []
    for _ in range(9):
        seen.append(pause)
        pause = next_pause(pause, 0.0)
    assert seen == [FIRST_BACKOFF_SECONDS * 2**n for n in range(6)] + [LAST_BACKOFF_SECONDS] * 3
    assert next_pause(0.0, 1.0) == FIRST_BACKOFF_SECONDS
