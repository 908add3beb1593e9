"""Two real processes: what the source publishes is what the destination holds, or the destination gets a typed error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import torch

from cache_transfer.load import CacheLoader, Loaded
from cache_transfer.paths import open_paths
from cache_transfer.regions import Landing
from slipstream import typed
from slipstream.config import TransferConfig
from slipstream.errors import (
    BusyError,
    CancelledError,
    CoverageError,
    DeadlineError,
    IncompatibleError,
    LeaseExpiredError,
    ProtocolError,
    TransferError,
)
from tests.support import transfer_rig
from tests.support.transfer_rig import Source

SOURCE = Landing(blocks=(9, 3, 40, 17, 5, 33, 2, 11, 60, 7), state_slot=5)
HERE = Landing(blocks=(1, 50, 6, 22, 13, 4, 8, 31, 30, 29), state_slot=2)


class Destination:
    def __init__(self, config: TransferConfig, dtype: str = "float32") -> None:
        self.layout = transfer_rig.layout(dtype)
        self.memory, self.held = transfer_rig.destination(self.layout)
        self.loader = CacheLoader(self.memory, open_paths(config, self.memory.extent, process="d0"), replica_id="d0", epoch=1,
                                  rank=0, config=config)

    async def load(self, source: Source, name: str, *, attempt: int = 0, epoch: int = 1, seconds: float = 20.0,
                   where: Landing | None = HERE) -> Loaded:
        async def admit(num_tokens: int) -> Landing | None:
            return where

        return await self.loader.load([source.address], transfer_id=name, attempt=attempt, source_epoch=epoch, request_id="r",
                                      remaining_seconds=seconds, admit=admit)


class Rig:
    """One channel: sources in processes of their own, destinations here."""

    def __init__(self, transfer: dict[str, object]) -> None:
        self.transfer = transfer

    def source(self, **arguments: object) -> AbstractAsyncContextManager[Source]:
        return transfer_rig.source(**{"transfer": self.transfer, **arguments})

    @asynccontextmanager
    async def destination(self, dtype: str = "float32") -> AsyncIterator[Destination]:
        here = Destination(typed.build(TransferConfig, self.transfer, "transfer", "the test"), dtype)
        try:
            yield here
        finally:
            await here.loader.close()


@pytest.fixture(params=["grpc", "local", "nixl"])
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "nixl":
        return Rig({"channel": "rdma", "rdma": {"engine": "nixl"}})
    return Rig({"channel": request.param})


def prompt(name: str, tokens: int, **more: object) -> dict[str, object]:
    return {"expect": name, "tokens": tokens, "blocks": SOURCE.blocks, "slot": SOURCE.state_slot, **more}


def check(here: Destination, tokens: int, seed: int = 1) -> None:
    """Every row and state equals the source's; every other block and slot is untouched."""
    sent = transfer_rig.rows(here.layout, transfer_rig.tensors(here.layout, seed), SOURCE, tokens)
    got = transfer_rig.rows(here.layout, here.held, HERE, tokens)
    for name in sent:
        assert torch.equal(sent[name], got[name]), name
    written = sum(int(tensor.float().count_nonzero()) for tensor in here.held.values())
    assert written == sum(int(tensor.float().count_nonzero()) for tensor in got.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
async def test_bytes_arrive_where_the_destination_wants_them(rig: Rig, dtype: str) -> None:
    async with rig.source(dtype=dtype) as source, rig.destination(dtype=dtype) as here:
        for tokens, chunks in ((1, [1]), (4, [4]), (17, [7, 7, 3]), (40, [40]), (39, [5, 1, 16, 17])):
            for tensor in here.held.values():
                tensor.zero_()
            await source.tell(**prompt(f"t{tokens}", tokens, chunks=chunks))
            loaded = await here.load(source, f"t{tokens}")
            check(here, tokens)
            assert (loaded.kv_bytes, loaded.state_bytes) == here.layout.bytes_necessary(tokens)
            assert (loaded.handoff.mrope.delta, loaded.handoff.mrope.last_position) == (-18, (3, 4, 5))
            assert loaded.handoff.choices[0].first_token == 7
            await loaded.close(committed=True)
            assert (await source.hear("done"))["committed"] is True
        await source.tell(state=True)
        assert (await source.hear("state"))["open"] == 0


async def test_a_destination_may_come_first_and_the_prompt_grow_later(rig: Rig) -> None:
    async with rig.source() as source, rig.destination() as here:
        load = asyncio.create_task(here.load(source, "t"))
        await source.tell(expect="t", tokens=17, hold=True)
        await source.hear("expected")
        assert not load.done()
        await source.tell(**{**prompt("t", 17, chunks=[4, 13]), "expect": "other", "hold": True})
        await source.tell(compute="t", tokens=17, blocks=SOURCE.blocks, slot=SOURCE.state_slot, chunks=[4, 13])
        await (await load).close(committed=True)
        check(here, 17)


async def test_busy_parks_and_a_higher_attempt_takes_over(rig: Rig) -> None:
    async with rig.source() as source, rig.destination() as here:
        await source.tell(**prompt("t", 17))
        with pytest.raises(BusyError):
            await here.load(source, "t", where=None)
        await source.hear("parked")
        with pytest.raises(ProtocolError, match="too late"):
            await here.load(source, "t", attempt=0)
        await (await here.load(source, "t", attempt=1)).close(committed=True)
        check(here, 17)


async def test_the_lease_ends_a_prompt_that_nobody_takes(rig: Rig) -> None:
    async with rig.source(lease=0.3) as source, rig.destination() as here:
        await source.tell(**prompt("t", 17))
        assert (await source.hear("failed"))["code"] == "lease_expired"
        with pytest.raises(LeaseExpiredError):
            await here.load(source, "t")


async def test_cancel_by_the_source_reaches_the_destination_in_every_state(rig: Rig) -> None:
    async with rig.source() as source, rig.destination() as here:
        for name, hold in (("before", None), ("waiting", True)):
            if hold:
                await source.tell(**prompt(name, 17, hold=True))
            load = asyncio.create_task(here.load(source, name))
            if hold:
                await source.hear("expected")
            await source.tell(fail=name)
            with pytest.raises(CancelledError):
                await asyncio.wait_for(load, 5)
        await source.tell(state=True)
        assert (await source.hear("state"))["open"] == 0


async def test_cancel_by_the_destination_parks_the_prompt(rig: Rig) -> None:
    async with rig.source() as source, rig.destination() as here:
        await source.tell(**prompt("t", 17, hold=True))
        await source.hear("expected")
        load = asyncio.create_task(here.load(source, "t"))
        await source.tell(compute="t", tokens=17, blocks=SOURCE.blocks, slot=SOURCE.state_slot, chunks=[4, 13])
        await source.hear("ready")
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        before = {name: tensor.clone() for name, tensor in here.held.items()}
        await source.hear("parked")
        await (await here.load(source, "t", attempt=1, where=Landing(blocks=tuple(range(40, 50)), state_slot=7))).close(
            committed=True)
        for name, tensor in before.items():  # the fenced landing was not written again
            assert torch.equal(tensor[: 40 if "kv" in name else 7], here.held[name][: 40 if "kv" in name else 7])


async def test_damaged_bytes_are_never_committed(rig: Rig) -> None:
    async with rig.source(transfer={**rig.transfer, "faults": {"corrupt": 0.5}}) as source, rig.destination() as here:
        refused = 0
        for number in range(12):
            await source.tell(**prompt(f"t{number}", 40, chunks=[7, 33]))
            try:
                loaded = await here.load(source, f"t{number}")
            except (CoverageError, TransferError):  # a frame, or the probe before the first one
                refused += 1
                continue
            check(here, 40)
            await loaded.close(committed=True)
        assert refused


async def test_a_state_of_another_length_is_refused(rig: Rig) -> None:
    async with rig.source() as source, rig.destination() as here:
        await source.tell(**prompt("t", 17, one_more=True))
        with pytest.raises(CoverageError, match="state after 18"):
            await here.load(source, "t")


async def test_a_prompt_finished_by_its_first_token_moves_nothing_more(rig: Rig) -> None:
    async with rig.source() as source, rig.destination() as here:
        await source.tell(**prompt("t", 17, finished=True))
        loaded = await here.load(source, "t")
        assert loaded.handoff.finished
        await loaded.close(committed=False)
        assert (await source.hear("done"))["committed"] is False


async def test_a_killed_source_is_noticed_and_its_successor_is_greeted_anew(rig: Rig) -> None:
    async with rig.destination() as here:
        async with rig.source(epoch=1) as source:
            await source.tell(**prompt("t", 17, hold=True))
            await source.hear("expected")
            load = asyncio.create_task(here.load(source, "t"))
            await source.tell(**prompt("u", 4))
            await (await here.load(source, "u")).close(committed=True)
            source.process.kill()
            with pytest.raises(TransferError, match=r"broke|no Hello"):
                await asyncio.wait_for(load, 5)
            address = source.address
        async with rig.source(epoch=2, listen=address) as source:
            await source.tell(**prompt("v", 17))
            with pytest.raises(TransferError, match="restarted"):
                await here.load(source, "v", epoch=1)
            await (await here.load(source, "v", epoch=2)).close(committed=True)
            check(here, 17)


async def test_layouts_that_differ_are_refused_by_name(rig: Rig) -> None:
    async with rig.source(dtype="bfloat16") as source, rig.destination(dtype="float32") as here:
        with pytest.raises(IncompatibleError, match="kv_dtype: ours float32, theirs bfloat16"):
            await here.load(source, "t")


async def test_the_deadline_ends_a_wait(rig: Rig) -> None:
    async with rig.source() as source, rig.destination() as here:
        await source.tell(**prompt("t", 17, hold=True))
        await source.hear("expected")
        with pytest.raises((DeadlineError, TransferError)):
            await here.load(source, "t", seconds=0.4)


async def test_fifty_at_once_over_ipv6(rig: Rig) -> None:
    async with rig.source(listen="[::1]:0") as source, rig.destination() as here:
        names = [f"t{i}" for i in range(50)]
        for name in names:
            await source.tell(**prompt(name, 17, chunks=[9, 8]))
        for loaded in await asyncio.gather(*(here.load(source, name) for name in names)):
            await loaded.close(committed=True)
        check(here, 17)
        for _ in names:
            await source.hear("done")
        await source.tell(state=True)
        assert (await source.hear("state"))["open"] == 0
