"""Two replicas of several ranks in this process, each rank with its own store or loader, joined by real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from torch import Tensor

from cache_transfer.channels.base import Channel
from cache_transfer.handoff import HandoffChoice
from cache_transfer.layout import CacheLayout
from cache_transfer.load import Admit, Loaded, given
from cache_transfer.regions import Landing
from cache_transfer.source import SourceTransfer
from slipstream.sharding import Geometry, Shard
from tests.support import transfer_rig
from tests.support.transfer_site import CountingChannel, Destination, Log, Site, handoff, serving


class Prefill:
    """The source's ranks."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites

    @property
    def addresses(self) -> list[str]:
        """By rank."""
        return [site.address for site in self.sites]

    @property
    def open_transfers(self) -> int:
        """Of all ranks."""
        return sum(site.store.open_transfers for site in self.sites)

    def prompt(self, name: str, tokens: int, where: Landing, *, cached: int = 0) -> list[tuple[SourceTransfer, Log]]:
        """Announced and placed on every rank."""
        return [site.prompt(name, tokens, cached=cached, where=where) for site in self.sites]

    async def compute(self, prompt: list[tuple[SourceTransfer, Log]], ends: list[int], *, finished: bool = False,
                      layers: bool = True) -> None:
        """As far as each of `ends` in turn, layer by layer; the last completes the prompt. `finished`: no choice goes on.
        `layers` False: nothing is computed."""
        for end in ends if layers else ():
            for layer in range(len(self.sites[0].layout.layers)):
                for site, (transfer, _) in zip(self.sites, prompt, strict=True):
                    if layer in site.shard.layers:
                        transfer.layer_done(layer, end, end == ends[-1])
                await asyncio.sleep(0)
        for site, (transfer, _) in zip(self.sites, prompt, strict=True):
            told = handoff(ends[-1], HandoffChoice(first_token=7, finished=finished))
            transfer.finish(told if site.shard.rank == 0 else None)


class Decode:
    """The destination's ranks."""

    def __init__(self, ranks: list[Destination]) -> None:
        self.ranks = ranks

    def load(self, addresses: list[str], name: str, tokens: int, where: Landing, *,
             attempt: int = 0) -> list[asyncio.Task[Loaded]]:
        """A load on every rank: rank 0 decides, then the others follow."""
        decided = asyncio.Event()

        async def admit(num_tokens: int) -> Landing:
            assert num_tokens == tokens
            decided.set()
            return where

        async def one(rank: int) -> Loaded:
            if rank:
                await decided.wait()
            return await self.one(rank, addresses, name, given(where, tokens) if rank else admit, attempt=attempt)

        return [asyncio.create_task(one(rank)) for rank in range(len(self.ranks))]

    async def one(self, rank: int, addresses: list[str], name: str, admit: Admit, *, attempt: int = 0) -> Loaded:
        """A load on one rank alone."""
        return await self.ranks[rank].loader.load(addresses, transfer_id=name, attempt=attempt, source_epoch=1, request_id="r",
                                                  remaining_seconds=20.0, admit=admit)


@asynccontextmanager
async def prefill(geometry: Geometry, layout: CacheLayout | None = None, *, channels: dict[int, Channel] | None = None,
                  frame_bytes: int = 1 << 16, lease_seconds: float = 30.0) -> AsyncIterator[Prefill]:
    """`channels`: of some ranks, by rank."""
    async with AsyncExitStack() as stack:
        yield Prefill([await stack.enter_async_context(serving(
            (channels or {}).get(rank, CountingChannel()), layout, frame_bytes=frame_bytes, lease_seconds=lease_seconds,
            shard=Shard(geometry=geometry, rank=rank))) for rank in range(geometry.world)])


@asynccontextmanager
async def decode(geometry: Geometry, layout: CacheLayout | None = None, mark: float = 0.0) -> AsyncIterator[Decode]:
    """`mark`: what every cache is full of."""
    ranks = [Destination("", 5.0, layout, 300.0, Shard(geometry=geometry, rank=rank)) for rank in range(geometry.world)]
    for here in ranks:
        for tensor in here.held.values():
            tensor.fill_(mark)
    try:
        yield Decode(ranks)
    finally:
        await asyncio.gather(*(here.loader.close() for here in ranks))


def landed(layout: CacheLayout, at: Landing, to: Landing, tokens: int, shard: Shard, mark: float) -> dict[str, Tensor]:
    """What a destination rank must hold: the source's states and rows from `have_tokens` on, `mark` everywhere else."""
    whole = transfer_rig.tensors(layout, seed=1)
    found = {name: tensor.clone().fill_(mark) for name, tensor in whole.items()}
    for name, tensor in whole.items():
        if not name.endswith(".kv"):
            found[name][to.state_slot] = tensor[at.state_slot]
            continue
        for token in range(to.have_tokens, tokens):
            block, row = divmod(token, layout.block_size)
            found[name][to.blocks[block], :, :, row] = tensor[at.blocks[block], :, :, row]
    return transfer_rig.cut(layout, found, shard)
