"""The Directory service, over a real gRPC connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import grpc.aio
import pytest

from launch import directory as directories
from launch.directory import Directory, Endpoint
from slipstream.errors import LaunchError, PlacementError
from slipstream.rpc.channel import connect
from slipstream.rpc.security import Security
from slipstream.rpc.server import listen, new_server
from slipstream.types import Role
from slipstream.v1 import directory_pb2 as pb
from slipstream.v1 import directory_pb2_grpc, worker_pb2

Watch = AsyncIterator[pb.Snapshot]


@pytest.fixture
async def directory() -> AsyncIterator[tuple[Directory, str]]:
    async def scale(replicas: Mapping[str, int]) -> Mapping[str, int]:
        if "decode" not in replicas:
            raise PlacementError("no room")
        return {**replicas, "prefill": 1}

    server, made = new_server(), Directory(scale)
    directory_pb2_grpc.add_DirectoryServicer_to_server(made, server)
    address = await listen(server, "127.0.0.1:0")
    yield made, address
    made.close()
    await server.stop(0)


async def following(watch: Watch) -> dict[str, tuple[int, str, int]]:
    snapshot = await asyncio.wait_for(anext(watch), 5)
    return {one.replica_id: (one.role, one.address, one.epoch) for one in snapshot.endpoints}


def endpoint(name: str, role: Role, epoch: int = 1) -> Endpoint:
    return Endpoint(replica_id=name, role=role, address=f"127.0.0.1:{epoch}", epoch=epoch)


async def test_the_whole_picture_at_once_and_after_every_change(directory: tuple[Directory, str]) -> None:
    made, address = directory
    made.put(endpoint("prefill-0", Role.PREFILL))
    async with connect(address) as channel:
        watch = aiter(directory_pb2_grpc.DirectoryStub(channel).Watch(pb.WatchRequest()))
        p = {"prefill-0": (worker_pb2.ROLE_PREFILL, "127.0.0.1:1", 1)}
        assert await following(watch) == p
        made.put(endpoint("decode-0", Role.DECODE))
        assert await following(watch) == p | {"decode-0": (worker_pb2.ROLE_DECODE, "127.0.0.1:1", 1)}
        made.put(endpoint("decode-0", Role.DECODE, epoch=2))
        assert (await following(watch))["decode-0"] == (worker_pb2.ROLE_DECODE, "127.0.0.1:2", 2)
        made.remove("decode-0")
        assert await following(watch) == p


async def test_two_of_one_name_are_refused_and_one_that_restarts_is_told(directory: tuple[Directory, str]) -> None:
    made, address = directory
    made.put(endpoint("decode-0", Role.DECODE, epoch=2))
    for epoch in (1, 2):
        with pytest.raises(LaunchError, match=rf"two workers are called decode-0: at 127\.0\.0\.1:2, .* epoch {epoch}$"):
            made.put(Endpoint(replica_id="decode-0", role=Role.DECODE, address="127.0.0.1:9", epoch=epoch))
    async with connect(address) as channel:
        watch = aiter(directory_pb2_grpc.DirectoryStub(channel).Watch(pb.WatchRequest()))
        assert await following(watch) == {"decode-0": (worker_pb2.ROLE_DECODE, "127.0.0.1:2", 2)}
        made.put(Endpoint(replica_id="decode-0", role=Role.DECODE, epoch=3, problem="ended with status 1"))
        told = pb.Endpoint(replica_id="decode-0", role=worker_pb2.ROLE_DECODE, epoch=3, problem="ended with status 1")
        assert await anext(watch) == pb.Snapshot(restarting=[told])
        made.put(endpoint("decode-0", Role.DECODE, epoch=3))
        assert await following(watch) == {"decode-0": (worker_pb2.ROLE_DECODE, "127.0.0.1:3", 3)}


async def test_who_has_no_token_neither_watches_nor_scales() -> None:
    async def no(replicas: Mapping[str, int]) -> Mapping[str, int]:
        raise AssertionError("asked by a stranger")

    trusted = Security(token="of this deployment")
    server = new_server(trusted)
    directory_pb2_grpc.add_DirectoryServicer_to_server(Directory(no), server)
    address = await listen(server, "127.0.0.1:0", trusted)
    with pytest.raises(LaunchError, match=r"security\.token_file.*with --config"):
        await asyncio.to_thread(directories.scale, address, {"decode": 2})
    async with connect(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await following(aiter(directory_pb2_grpc.DirectoryStub(channel).Watch(pb.WatchRequest())))
    await server.stop(0)


async def test_a_slow_watcher_gets_the_latest_picture(directory: tuple[Directory, str]) -> None:
    made, address = directory
    async with connect(address) as channel:
        watch = aiter(directory_pb2_grpc.DirectoryStub(channel).Watch(pb.WatchRequest()))
        assert await following(watch) == {}
        for epoch in range(1, 50):
            made.put(endpoint("decode-0", Role.DECODE, epoch))
        while (await following(watch))["decode-0"][2] != 49:
            pass


async def test_closing_ends_every_watch(directory: tuple[Directory, str]) -> None:
    made, address = directory
    async with connect(address) as channel:
        watch = aiter(directory_pb2_grpc.DirectoryStub(channel).Watch(pb.WatchRequest()))
        assert await following(watch) == {}
        made.close()
        with pytest.raises((StopAsyncIteration, grpc.aio.AioRpcError)):
            await following(watch)


async def test_a_wish_to_scale_is_passed_on_and_a_refusal_comes_back_in_its_words(directory: tuple[Directory, str]) -> None:
    _, address = directory
    assert await asyncio.to_thread(directories.scale, address, {"decode": 3}) == {"decode": 3, "prefill": 1}
    with pytest.raises(LaunchError, match=r"^no room$"):
        await asyncio.to_thread(directories.scale, address, {"prefill": 3})


async def test_a_supervisor_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match=r"the supervisor at 127\.0\.0\.1:1: .*with --config"):
        await asyncio.to_thread(directories.scale, "127.0.0.1:1", {"decode": 3})
