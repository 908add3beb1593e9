"""Peers of a worker that speak nonsense, stop reading or leave in the middle: each costs its own stream and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from prefill.images import ImageIntake, ImageStore
from slipstream.block_hash import content_hash
from slipstream.rpc.server import listen, new_server
from slipstream.types import EngineLoad, Role
from slipstream.v1 import worker_pb2 as pb
from slipstream.v1 import worker_pb2_grpc
from tests.unit.test_worker_session import ScriptedRole, cancel, submit
from worker import session as sessions
from worker.replica import Replica
from worker.service import SERVICE, Identity, WorkerService, _read
from worker.session import Session

LOAD = EngineLoad(waiting=0, running=0, parked=0, free_blocks=8, total_blocks=8, free_state_slots=0, total_state_slots=0)
RUBBISH = b"\xff\xff"
PICTURE = bytes(range(48)) * 64


@pytest.fixture(autouse=True)
def nothing_is_logged_as_a_fault(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[WorkerService, grpc.aio.Channel]]:
    """A prefill worker's service whose role is scripted, and a connection to it."""
    intake = ImageIntake(ImageStore(1 << 20), 32, content_hash)
    replica = cast(Replica, SimpleNamespace(capacity=LOAD))
    service = WorkerService(Identity(replica_id="p0", epoch=1, role=Role.PREFILL), replica, ScriptedRole(), intake.take)
    server = new_server()
    service.add_to(server)
    address = await listen(server, "127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield service, channel
    await server.stop(None)


def session_of(channel: grpc.aio.Channel) -> Any:
    """A Session that writes and reads bytes."""
    return channel.stream_stream(f"/{SERVICE}/Session")()


async def status(call: Any) -> grpc.StatusCode:
    """How a Session ends, everything before that read."""
    async with asyncio.timeout(5):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        code: grpc.StatusCode = await call.code()
        return code


async def picture() -> AsyncIterator[pb.ImageChunk]:
    yield pb.ImageChunk(content_hash=content_hash(32, 32, PICTURE), height=32, width=32, data=PICTURE)


@pytest.mark.parametrize("before", [0, 1])
async def test_a_picture_of_rubbish_is_the_senders_mistake(before: int) -> None:
    async with serving() as (_, channel):
        async def stream() -> AsyncIterator[bytes]:
            for _ in range(before):
                yield pb.ImageChunk(content_hash=bytes(16), height=32, width=32).SerializeToString()
            yield RUBBISH

        put: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"/{SERVICE}/PutImage")
        with pytest.raises(grpc.aio.AioRpcError, match="no message") as error:
            await put(stream())
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stub = worker_pb2_grpc.WorkerStub(channel)
        assert not (await stub.PutImage(picture(), timeout=5)).already_present
        assert (await stub.PutImage(picture(), timeout=5)).already_present


async def test_rubbish_on_a_session_ends_it_and_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (service, channel):
        stub = worker_pb2_grpc.WorkerStub(channel)
        other, doomed = stub.Session(), session_of(channel)
        await other.write(submit(1, "kept"))
        await doomed.write(submit(2, "lost").SerializeToString())
        async with asyncio.timeout(5):
            while len(service._jobs) < 2:  # noqa: ASYNC110 (the service's own loop)
                await asyncio.sleep(0.01)
        await doomed.write(RUBBISH)
        assert await status(doomed) is grpc.StatusCode.INVALID_ARGUMENT
        assert [str(id) for id in service._jobs._jobs] == ["kept"]
        assert sum("session ends" in record.message for record in caplog.records) == 1
        await other.done_writing()
        assert await status(other) is grpc.StatusCode.OK


async def test_a_stream_that_is_half_closed_at_once_ends() -> None:
    """Its first report may be on its way just then."""
    async with serving() as (service, channel):
        for _ in range(20):
            call = session_of(channel)
            await call.done_writing()
            assert await status(call) is grpc.StatusCode.OK
        assert not service._sessions


async def test_a_router_that_does_not_read_is_not_read_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what gets an answer each time; all answers are there once it reads."""
    monkeypatch.setattr(sessions, "MAX_UNREAD", 10)
    async with serving() as (service, _):
        session = Session(Role.PREFILL, service._jobs, pb.Load)

        async def messages() -> AsyncIterator[pb.RouterMessage]:
            for handle in range(100):
                yield cancel(handle) if handle % 2 else pb.RouterMessage(submit=pb.Submit(handle=handle))

        reading = asyncio.create_task(_read(session, messages()))
        told: list[int] = []
        while len(told) < 100:
            done, _ = await asyncio.wait({reading}, timeout=0.01)
            report = (await asyncio.wait_for(session.next_message(), 5)).step  # type: ignore[union-attr]
            assert len(report.failed) <= 10
            told += [failed.handle for failed in report.failed]
            assert not done or len(told) >= 90
        assert told == list(range(100))
        await reading
