"""What is cached on either side: rows that the destination has never travel, and nothing that it has is ever written."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache_transfer.handoff import HandoffChoice
from cache_transfer.layout import CacheLayout, Kind
from cache_transfer.regions import Landing
from cache_transfer.source import SourceTransfer
from slipstream.errors import BusyError, ProtocolError
from slipstream.types import AttentionLayer, LayerSpec, LinearLayer
from tests.support import transfer_rig
from tests.support.transfer_site import destination, handoff, serving

HERE = Landing(blocks=(1, 50, 6, 22, 13), state_slot=2)
DENSE = CacheLayout(model_name="dense", weights_revision="w", block_size=4, kv_dtype="float32", conv_dtype="float32",
                    layers=(AttentionLayer(name="layers.0", kv_heads=1, head_size=2),))
MARK = -7.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One destination's try: what it has, and after how many of the prompt's steps it ends."""

    have_tokens: int
    ending: str
    """`busy`: no memory; `lost`: gone while its bytes were on their way; `committed`."""
    steps: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: CacheLayout
    frame_bytes: int
    tokens: int
    cached: int
    chunk_ends: tuple[int, ...]
    source: Landing
    attempts: tuple[Attempt, ...]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(layer, rows that are final after it), in the order of computing."""
        return [(layer, end) for end in self.chunk_ends for layer in range(len(self.layout.layers))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    layers: list[LayerSpec] = []
    for number, attention in enumerate(kinds):
        if attention:
            layers.append(AttentionLayer(name=f"layers.{number}", kv_heads=draw(st.integers(1, 2)), head_size=2))
        else:
            layers.append(LinearLayer(name=f"layers.{number}", key_heads=1, value_heads=draw(st.integers(1, 2)),
                                      key_head_size=2, value_head_size=3, conv_width=3))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    layout = CacheLayout(model_name="any", weights_revision="w", layers=tuple(layers), block_size=block_size,
                         kv_dtype=dtype, conv_dtype=dtype)
    tokens = draw(st.integers(1, 20))
    whole = tokens // block_size
    cached = draw(st.integers(0, (tokens - 1) // block_size)) * block_size
    ends = sorted(draw(st.sets(st.integers(cached + 1, tokens), max_size=3)) | {tokens})
    endings = [*draw(st.lists(st.sampled_from(["busy", "lost"]), max_size=2)), "committed"]
    needed = -(-tokens // block_size)
    everywhere = draw(st.permutations(range(transfer_rig.BLOCKS)))
    attempts = [Attempt(have_tokens=block_size * draw(st.integers(0, whole)), ending=ending,
                        steps=draw(st.integers(0, len(ends) * len(layers))),
                        blocks=tuple(everywhere[number * needed : (number + 1) * needed]))
                for number, ending in enumerate(endings)]
    source = Landing(blocks=tuple(draw(st.permutations(range(transfer_rig.BLOCKS)))[:needed]),
                     state_slot=draw(st.integers(0, transfer_rig.SLOTS - 1)))
    return Case(layout=layout, frame_bytes=draw(st.sampled_from([1, 7, 60, 1000, 1 << 16])), tokens=tokens, cached=cached,
                chunk_ends=tuple(ends), source=source, attempts=tuple(attempts))


def expected(case: Case, held: dict[str, Tensor], before: dict[str, Tensor], where: Landing) -> dict[str, Tensor]:
    """`before` with the source's states and its rows from `have_tokens` on, by plain indexing."""
    rows = transfer_rig.rows(case.layout, held, case.source, case.tokens)
    found = {name: tensor.clone() for name, tensor in before.items()}
    for spec in case.layout.tensors:
        if spec.kind is not Kind.KV:
            found[spec.name][where.state_slot] = rows[spec.name]
            continue
        for token in range(where.have_tokens, case.tokens):
            block, row = where.blocks[token // case.layout.block_size], token % case.layout.block_size
            found[spec.name][block, :, :, row] = rows[spec.name][token]
    return found


class Prefill:
    """Computes a case's prompt step by step: until a row or a state is final, the source's memory holds something else."""

    def __init__(self, case: Case, held: dict[str, Tensor]) -> None:
        self.case = case
        self.held = held
        self.truth = {name: tensor.clone() for name, tensor in held.items()}
        self._done = 0
        for layer in range(len(case.layout.layers)):
            self._write(layer, case.cached, case.tokens, final=False)

    def _write(self, layer: int, first: int, end: int, *, final: bool) -> None:
        where, size = self.case.source, self.case.layout.block_size
        for spec in self.case.layout.tensors:
            if spec.layer != layer:
                continue
            held, truth = self.held[spec.name], self.truth[spec.name]
            if spec.kind is not Kind.KV:
                held[where.state_slot] = truth[where.state_slot] if final and end == self.case.tokens else float(first)
                continue
            for token in range(first, end):
                block, row = where.blocks[token // size], token % size
                held[block, :, :, row] = truth[block, :, :, row] if final else float(token)

    async def publish(self, transfer: SourceTransfer, steps: int) -> None:
        """Go on until so many steps are done in all."""
        for layer, end in self.case.steps[self._done : steps]:
            begin = max((earlier for earlier in self.case.chunk_ends if earlier < end), default=self.case.cached)
            self._write(layer, begin, end, final=True)
            transfer.layer_done(layer, end, end == self.case.tokens)
            await asyncio.sleep(0)
        self._done = max(self._done, steps)


@settings(max_examples=60, deadline=None)
@given(cases())
async def test_any_prompt_lands_whole_whatever_is_cached_and_whoever_tried_before(case: Case) -> None:
    """Bytes are the formula's, frames are short, and memory is equal to the byte: only what was sent has changed."""
    async with (serving(layout=case.layout, frame_bytes=case.frame_bytes) as site,
                destination(site.address, layout=case.layout) as here):
        for tensor in here.held.values():
            tensor.fill_(MARK)
        prefill = Prefill(case, site.held)
        transfer, log = site.prompt("t", case.tokens, cached=case.cached, where=case.source)
        for number, attempt in enumerate(case.attempts):
            where = Landing(blocks=attempt.blocks, state_slot=number, have_tokens=attempt.have_tokens)
            before = {name: tensor.clone() for name, tensor in here.held.items()}
            here.channel.payloads.clear()
            if attempt.ending == "busy":
                with pytest.raises(BusyError):
                    await here.load("t", attempt=number, where=None)
                await log.until_last("parked")
                continue
            load = asyncio.create_task(here.load("t", attempt=number, where=where))
            await log.until_last("ready")
            if attempt.ending == "lost":
                await prefill.publish(transfer, attempt.steps)
                load.cancel()
                await asyncio.wait((load,))
                await log.until_last("parked")
                continue
            await prefill.publish(transfer, len(case.steps))
            transfer.finish(handoff(case.tokens))
            loaded = await load
            wanted = case.layout.bytes_necessary(case.tokens - attempt.have_tokens)
            assert (loaded.kv_bytes, loaded.state_bytes) == wanted
            assert sum(here.channel.payloads) == sum(wanted)
            block = max(spec.unit_bytes * case.layout.block_size if spec.kind is Kind.KV else 1 for spec in case.layout.tensors)
            assert all(size < case.frame_bytes + block for size in here.channel.payloads)
            await loaded.close(committed=True)
            await log.until_last("done")
            assert all(torch.equal(tensor, here.held[name])
                       for name, tensor in expected(case, prefill.truth, before, where).items())
        assert site.store.open_transfers == 0


@pytest.mark.parametrize("have", [3, 20, 44])
async def test_a_destination_cannot_have_parts_of_blocks_nor_more_than_the_prompt(have: int) -> None:
    async with serving() as site, destination(site.address) as here:
        _, log = site.prompt("t", 17)
        with pytest.raises(ProtocolError, match=f"has {have} of 17 tokens"):
            await here.load("t", where=Landing(blocks=HERE.blocks, state_slot=2, have_tokens=have))
        await log.until("failed")
        assert isinstance(log.error, ProtocolError)


@pytest.mark.parametrize("layout", [DENSE, transfer_rig.layout()], ids=["dense", "hybrid"])
async def test_a_destination_that_has_the_whole_prompt_frees_the_source_at_once(layout: CacheLayout) -> None:
    """The same prompt twice: the second time no row travels, a dense one sends no frame at all, and the source is done."""
    async with serving(layout=layout) as site, destination(site.address, layout=layout) as here:
        first, log = site.prompt("first", 16)
        site.compute(first, 16)
        await (await here.load("first", where=HERE)).close(committed=True)
        await log.until("ready", "done")
        here.channel.payloads.clear()
        again, log = site.prompt("again", 16, cached=12)
        site.compute(again, 16)
        loaded = await here.load("again", where=Landing(blocks=HERE.blocks, state_slot=2, have_tokens=16))
        assert (loaded.kv_bytes, loaded.state_bytes) == (0, layout.bytes_necessary(16)[1])
        assert bool(here.channel.payloads) is bool(loaded.state_bytes)
        assert not loaded.handoff.finished
        await loaded.close(committed=True)
        await log.until("ready", "done")
        assert site.store.open_transfers == 0


async def test_cached_rows_go_before_anything_is_computed() -> None:
    async with serving(layout=DENSE) as site, destination(site.address, layout=DENSE) as here:
        transfer, _ = site.prompt("t", 17, cached=16)
        load = asyncio.create_task(here.load("t", where=HERE))
        await asyncio.wait_for(here.channel.landed.wait(), 20)
        assert here.channel.payloads == [DENSE.bytes_necessary(16)[0]]
        site.compute(transfer, 17)
        await (await load).close(committed=True)
        assert sum(here.channel.payloads) == DENSE.bytes_necessary(17)[0]


@pytest.mark.parametrize(("finished", "computed"), [((True, False, False), True), ((False, True, True), True),
                                                    ((True, True, True), False)])
async def test_bytes_travel_as_long_as_one_choice_goes_on(finished: tuple[bool, ...], computed: bool) -> None:
    """One transfer for all choices of a request. If the first tokens ended all of them, the bytes need not be final at all."""
    choices = tuple(HandoffChoice(choice=3 + number, first_token=100 + number, finished=ended)
                    for number, ended in enumerate(finished))
    async with serving() as site, destination(site.address) as here:
        transfer, log = site.prompt("t", 17)
        if computed:
            for layer in range(4):
                transfer.layer_done(layer, 17, True)
        transfer.finish(handoff(17, *choices))
        loaded = await here.load("t", where=HERE)
        assert loaded.handoff.choices == choices
        assert loaded.handoff.finished is not computed
        assert (loaded.kv_bytes, loaded.state_bytes) == (here.layout.bytes_necessary(17) if computed else (0, 0))
        await loaded.close(committed=computed)
        await log.until("ready", "done" if computed else "done, not committed")
