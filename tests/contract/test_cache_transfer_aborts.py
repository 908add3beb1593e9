"""Either side gives up, at any moment: both owners hear why, once, and nothing stays taken."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
import torch

from cache_transfer.regions import Landing
from slipstream.errors import (
    CancelledError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    SlipstreamError,
    TransferError,
)
from slipstream.types import RequestId
from tests.support import transfer_rig
from tests.support.transfer_site import PLACE, Destination, Log, Site, destination, serving

TOKENS = 17
HERE = Landing(blocks=(1, 50, 6, 22, 13), state_slot=2)


@pytest.mark.parametrize("stage", ["announced", "ready", "sending"])
@pytest.mark.parametrize("error", [ContextLengthError("too long"), DeadlineError("too late"), CancelledError("gone")])
async def test_why_the_source_gave_up_is_what_the_destination_raises(error: SlipstreamError, stage: str) -> None:
    async with serving() as site, destination(site.address) as here:
        transfer, log = site.prompt("t", TOKENS)
        load = None
        if stage != "announced":
            load = asyncio.create_task(here.load("t"))
            await log.until("ready")
        if stage == "sending":
            site.compute(transfer, TOKENS, layers=3)
            await asyncio.wait_for(here.channel.landed.wait(), 20)
        site.store.refuse("t", error)
        for coming in (load, here.load("t", attempt=1)):  # who comes late hears it too
            if coming is not None:
                with pytest.raises(type(error), match=error.message):
                    await coming
        assert log.heard == ([] if stage == "announced" else ["ready"]) + ["failed"]
        assert site.store.open_transfers == 0


async def test_a_transfer_id_is_one_request_s() -> None:
    """Neither a second prompt nor another request's destination gets at a transfer that goes on."""
    async with serving() as site, destination(site.address) as here:
        transfer, log = site.prompt("t", TOKENS)
        with pytest.raises(InvalidRequestError, match="t is in use"):
            site.store.expect("t", RequestId(name="other"), TOKENS, Log())
        with pytest.raises(ProtocolError, match="request r's, not other's"):
            await here.load("t", request="other", attempt=7)
        assert (log.heard, site.store.open_transfers) == ([], 1)
        site.compute(transfer, TOKENS)
        await (await here.load("t")).close(committed=True)
        await log.until("ready", "done")
        with pytest.raises(TransferError, match="is over"):  # nor is an id used again
            site.store.expect("t", RequestId(name="r"), TOKENS, Log())
        assert site.store.open_transfers == 0


async def one(site: Site, here: Destination, name: str, rng: random.Random) -> str:
    """A request that either side may leave at any moment, treated as its owners would; returns how it ended."""
    transfer, log = site.prompt(name, TOKENS)
    load = asyncio.create_task(here.load(name, where=HERE))
    leaves: list[Callable[[], object]] = [load.cancel, lambda: transfer.fail(CancelledError("gone")), lambda: None]
    leaver = asyncio.get_running_loop().call_later(rng.random() * 0.03, rng.choice(leaves))
    for layer in range(3):
        await asyncio.sleep(rng.random() * 0.005)
        transfer.layer_done(layer, TOKENS, True)
    site.compute(transfer, TOKENS)
    try:
        await (await load).close(committed=True)
        ending = "loaded"
    except asyncio.CancelledError:
        ending = "left"
    except SlipstreamError as error:
        ending = error.code
    leaver.cancel()
    transfer.fail(CancelledError("its owner cleans up"))  # nothing if it is over
    assert [event in ("done", "failed") for event in log.heard].count(True) == 1, log.heard
    return ending


async def test_two_hundred_requests_that_either_side_leaves_at_any_moment_leave_nothing_behind() -> None:
    rng = random.Random(5)
    async with serving(frame_bytes=1000) as site, destination(site.address) as here:
        site.compute(site.prompt("first", TOKENS)[0], TOKENS)
        await (await here.load("first", where=HERE)).close(committed=True)
        before = len(asyncio.all_tasks())
        endings = await asyncio.gather(*(one(site, here, f"t{number}", rng) for number in range(200)))
        assert set(endings) == {"loaded", "left", "cancelled"}
        assert site.store.open_transfers == 0
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - streams that were cut off end by themselves
                await asyncio.sleep(0.01)
        for tensor in here.held.values():
            tensor.zero_()
        site.compute(site.prompt("last", TOKENS)[0], TOKENS)
        await (await here.load("last", where=HERE)).close(committed=True)
        sent, got = (transfer_rig.rows(site.layout, held, where, TOKENS)
                     for held, where in ((site.held, PLACE), (here.held, HERE)))
        assert all(torch.equal(tensor, got[name]) for name, tensor in sent.items())
