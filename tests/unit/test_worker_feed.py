"""What a worker tells of its prefix cache: whoever reads, late or early, ends with what is there."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prefix_index import PrefixIndex
from slipstream.errors import InvalidRequestError
from slipstream.types import Role
from slipstream.v1 import worker_pb2 as pb
from tests.unit.test_worker_session import ScriptedRole
from worker import feed as feed_module
from worker.feed import CacheFeed, CacheWatch
from worker.jobs import Jobs
from worker.session import Session, make_job

LEVELS = st.dictionaries(st.integers(0, 30), st.sampled_from([0, 1, 2]), max_size=6)


def read(watch: CacheWatch, index: PrefixIndex) -> None:
    told = watch.next()
    assert index.hear("w", told.number, reset=told.reset, blocks=told.blocks, snapshots=told.snapshots, removed=told.removed)


@given(st.lists(st.tuples(st.sampled_from(["read", "apply", "whole"]), LEVELS), max_size=30), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_a_slow_reader_knows_what_is_there_once_it_has_read(events: list[tuple[str, dict[int, int]]], most: int) -> None:
    """From the feed to the router's index, in messages of any size; what was not read is merged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "MAX_KEYS", most)
        feed, index, plain = CacheFeed(), PrefixIndex(10_000, 0), dict[int, int]()
        feed.apply({5: 1, 6: 2}, whole=False)
        plain |= {5: 1, 6: 2}
        watch = feed.watch()
        index.add("w")
        for what, levels in events:
            if what == "read":
                if watch.waits:
                    read(watch, index)
                continue
            feed.apply(levels, whole=what == "whole")
            plain = ({} if what == "whole" else plain) | levels
            plain = {key: level for key, level in plain.items() if level}
            assert len(watch._pending) <= 2 * len(feed) + most, "what is not read is bounded by what is there"
        while watch.waits:
            read(watch, index)
        assert index.keys("w") == plain
        watch.close()
        feed.apply({1: 1}, whole=False)
        assert not watch.waits, "who is gone is told nothing"


def test_what_nobody_reads_does_not_grow_with_what_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_KEYS", 10)
    feed = CacheFeed()
    watch = feed.watch()
    for key in range(1000):
        feed.apply({key: 1, key - 5: 0}, whole=False)
        assert len(watch._pending) <= 2 * 5 + 10
    index = PrefixIndex(10_000, 0)
    index.add("w")
    while watch.waits:
        read(watch, index)
    assert index.keys("w") == dict.fromkeys(range(995, 1000), 1)


async def test_a_session_tells_a_router_that_watches_with_its_reports() -> None:
    feed = CacheFeed()
    session = Session(Role.PREFILL, Jobs(ScriptedRole()), lambda: pb.Load(free_blocks=7), feed)
    feed.apply({1: 1, 2: 2}, whole=False)
    session.want_load()
    assert not cast(Any, await session.next_message()).HasField("step"), "nobody watches"
    session.receive(pb.RouterMessage(watch_cache=pb.WatchCache()))
    async with asyncio.timeout(5):
        message = await session.next_message()
    assert message is not None
    cache = message.step.cache
    assert (cache.number, cache.reset, list(cache.blocks), list(cache.snapshots)) == (1, True, [1], [2])
    assert message.step.load.free_blocks == 7
    feed.apply({1: 0, 3: 1}, whole=False)
    session.want_load()
    async with asyncio.timeout(5):
        message = await session.next_message()
    assert message is not None
    cache = message.step.cache
    assert (cache.number, cache.reset, list(cache.blocks), list(cache.removed)) == (2, False, [3], [1])
    session.receive(pb.RouterMessage(watch_cache=pb.WatchCache()))
    async with asyncio.timeout(5):
        message = await session.next_message()
    assert message is not None
    assert (message.step.cache.number, message.step.cache.reset) == (1, True), "asked again: all of it"
    session.close()
    assert feed._watches == set()


async def test_a_local_prompt_is_for_decode_and_has_neither_a_source_nor_pictures() -> None:
    session = Session(Role.DECODE, Jobs(ScriptedRole()), pb.Load)
    plain = pb.Submit(handle=1, request_id="r", transfer_id="t", tokens=[1], max_tokens=4, remaining_ms=1000, local=True)
    assert make_job(plain, Role.DECODE, session).submit.local
    image = pb.Image(content_hash=b"h" * 16, grid_t=1, grid_h=2, grid_w=2)
    for role, more in ((Role.PREFILL, pb.Submit()), (Role.DECODE, pb.Submit(prefill_addresses=["a:1"])),
                       (Role.DECODE, pb.Submit(images=[image]))):
        wrong = pb.Submit()
        wrong.CopyFrom(plain)
        wrong.MergeFrom(more)
        with pytest.raises(InvalidRequestError, match="local"):
            make_job(wrong, role, session)
    plain.local = False
    with pytest.raises(InvalidRequestError, match="prefill_addresses"):
        make_job(plain, Role.DECODE, session)
