"""A sick channel by configuration: whatever it does to frames, a prompt lands whole or ends with a typed error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from cache_transfer import frames
from cache_transfer.channels.rdma import RdmaChannel
from cache_transfer.leg import Leg
from cache_transfer.load import CacheLoader
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import Paths, open_paths
from cache_transfer.regions import Landing
from cache_transfer.source import SourceTransfer
from cache_transfer.store import CacheStore
from cache_transfer.stream import Write
from slipstream.config import FaultsConfig, TransferConfig
from slipstream.errors import CancelledError, CoverageError, ProtocolError, SlipstreamError, StalledError, TransferError
from slipstream.rpc.server import listen, new_server
from slipstream.types import RequestId
from slipstream.v1 import cache_store_pb2 as pb
from tests.support import transfer_rig
from tests.support.transfer_site import Log, handoff

LAYOUT = transfer_rig.layout()
TOKENS = 200
THERE = Landing(blocks=tuple(range(50)), state_slot=3)
HERE = Landing(blocks=tuple(reversed(range(10, 60))), state_slot=1)


class Sick:
    """A source with these faults and a healthy destination, in this process."""

    def __init__(self, config: TransferConfig) -> None:
        self.held = transfer_rig.tensors(LAYOUT, seed=1)
        memory = CacheMemory(LAYOUT, self.held)
        self.store = CacheStore(memory, open_paths(config, memory.extent, process="p0"), replica_id="p0", epoch=1, rank=0,
                                config=config)
        self.memory, self.landed = transfer_rig.destination(LAYOUT)
        healthy = TransferConfig(channel=config.channel)
        self.loader = CacheLoader(self.memory, open_paths(healthy, self.memory.extent, process="d0"), replica_id="d0", epoch=1,
                                  rank=0, config=healthy)
        self.address = ""

    def prompt(self, name: str) -> tuple[SourceTransfer, Log]:
        """Computed already."""
        log = Log()
        transfer = self.store.expect(name, RequestId(name="r"), TOKENS, log)
        transfer.begin(0)
        transfer.allocated(THERE.blocks, THERE.state_slot, 0)
        for layer in range(len(LAYOUT.layers)):
            transfer.layer_done(layer, TOKENS, True)
        transfer.finish(handoff(TOKENS))
        return transfer, log

    async def load(self, name: str, attempt: int = 0) -> None:
        """Raises what `CacheLoader.load` does; else everything is here."""
        async def admit(num_tokens: int) -> Landing:
            return HERE

        for tensor in self.landed.values():
            tensor.zero_()
        loaded = await self.loader.load([self.address], transfer_id=name, attempt=attempt, source_epoch=1, request_id="r",
                                        remaining_seconds=20.0, admit=admit)
        sent = transfer_rig.rows(LAYOUT, self.held, THERE, TOKENS)
        got = transfer_rig.rows(LAYOUT, self.landed, HERE, TOKENS)
        assert all(torch.equal(sent[key], got[key]) for key in sent)
        await loaded.close(committed=True)


@asynccontextmanager
async def sick(*, channel: str = "grpc", stall_seconds: float = 10.0, checksum: bool = True,
               **faults: Any) -> AsyncIterator[Sick]:
    made = Sick(TransferConfig(channel=channel, frame_bytes=4096, stall_seconds=stall_seconds, checksum=checksum,
                               faults=FaultsConfig(**faults)))
    server = new_server()
    made.store.add_to(server)
    made.address = await listen(server, "127.0.0.1:0")
    yield made
    await made.loader.close()
    await server.stop(None)


@pytest.mark.parametrize(("faults", "error", "says"), [
    ({"drop": 1.0}, CoverageError, "of [0-9]+ units arrived"), ({"drop": 0.5}, ProtocolError, "expected to go on from"),
    ({"duplicate": 1.0}, ProtocolError, "expected to go on from"), ({"corrupt": 1.0}, CoverageError, "checksum"),
    ({"cut": 1.0}, TransferError, "before it was complete")])
async def test_each_fault_is_noticed(faults: dict[str, Any], error: type[SlipstreamError], says: str) -> None:
    async with sick(**faults) as site:
        site.prompt("t")
        with pytest.raises(error, match=says):
            await site.load("t")


async def test_a_cut_parks_the_prompt_and_a_stall_does_after_its_time() -> None:
    total = sum(LAYOUT.bytes_necessary(TOKENS))
    for faults, error, says in (
            (dict[str, Any](cut=1.0), TransferError, f"it was complete; 0 of {total} bytes had come [0-9.]+ s after"),
            (dict[str, Any](stall_at_bytes=10_000), StalledError,
             f"stalled: nothing moved for 0.3 s; [1-9][0-9]+ of {total} bytes had come 0.[3-9] s after")):
        async with sick(stall_seconds=0.3, **faults) as site:
            _, log = site.prompt("t")
            with pytest.raises(error, match=says):
                await site.load("t")
            await log.until_last("parked")


@pytest.mark.parametrize("channel", ["grpc", "local"])
async def test_prompts_over_a_rate_of_faults_land_whole_or_not_at_all(channel: str) -> None:
    landed = failed = 0
    async with sick(channel=channel, seed=1, drop=0.01, duplicate=0.01, corrupt=0.01, cut=0.01, delay_seconds=0.001) as site:
        for number in range(40):
            site.prompt(f"t{number}")
            try:
                await site.load(f"t{number}")
            except SlipstreamError:
                failed += 1
            else:
                landed += 1
    assert landed
    assert failed


@pytest.mark.parametrize(("checksum", "error"), [(True, CoverageError), (False, CancelledError)])
async def test_a_prompt_that_is_freed_while_it_is_read_never_lands(monkeypatch: pytest.MonkeyPatch, checksum: bool,
                                                                   error: type[SlipstreamError]) -> None:
    """The source has said all and waits for Done as it gives the prompt up; its destination reads only then."""
    sent, read = asyncio.Event(), Leg.read

    def writer(self: Paths, write: Write) -> Write:
        async def heard(frame: bytes) -> None:
            await write(frame)
            word = frames.parse(frame)
            if isinstance(word, pb.Control) and word.WhichOneof("message") == "sent":
                sent.set()

        return heard

    async def late(self: Leg) -> bytes:
        frame = await read(self)
        if frames.is_data(frame):
            await sent.wait()
            transfer.fail(CancelledError("the client went away"))
            for tensor in site.held.values():
                tensor.fill_(9)
        return frame

    monkeypatch.setattr(Paths, "writer", writer)
    monkeypatch.setattr(Leg, "read", late)
    async with sick(channel="local", checksum=checksum) as site:
        transfer, _ = site.prompt("t")
        with pytest.raises(error):
            await site.load("t")


async def test_what_is_read_without_checksums_lands() -> None:
    async with sick(channel="local", checksum=False) as site:
        _, log = site.prompt("t")
        await site.load("t")
        await log.until("ready", "done")


async def test_all_streams_share_a_slow_link() -> None:
    size = sum(LAYOUT.bytes_necessary(TOKENS))
    async with sick(bytes_per_second=size / 0.2) as site:
        loop = asyncio.get_running_loop()
        for number in range(3):
            site.prompt(f"t{number}")
        began = loop.time()
        await asyncio.gather(*(site.load(f"t{number}") for number in range(3)))
        assert loop.time() - began >= 0.59, "three prompts take three times as long as one"


async def test_a_source_that_writes_by_itself_hears_a_cancel_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The landing is not kept until the whole prompt has come."""
    monkeypatch.setattr(RdmaChannel, "frame_bytes", 4096)
    async with sick(channel="rdma", bytes_per_second=sum(LAYOUT.bytes_necessary(TOKENS)) / 20) as site:
        _, log = site.prompt("t")
        load = asyncio.create_task(site.load("t"))
        async with asyncio.timeout(10):
            while not any(tensor.any() for tensor in site.landed.values()):  # noqa: ASYNC110 - written from beside
                await asyncio.sleep(0.01)
        load.cancel()
        done, _ = await asyncio.wait((load,), timeout=5)
        assert done, "the source goes on and on"
        assert load.cancelled()
        await log.until_last("parked")
