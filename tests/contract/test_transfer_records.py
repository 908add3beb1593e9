"""What both ends say of a stream, in logs and metrics: equal bytes, times in order, and how it ended as each saw it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry

from cache_transfer.channels.base import Buffer, UnsettledError
from cache_transfer.leg import Leg
from cache_transfer.paths import Paths
from cache_transfer.record import EVENTS
from cache_transfer.spans import Spans
from cache_transfer.transfers import Transfers
from slipstream.errors import BusyError, CancelledError, CoverageError, DeadlineError, SlipstreamError, TransferError
from slipstream.observability.transfer_metrics import TransferMetrics
from slipstream.types import Role
from slipstream.v1 import cache_store_pb2 as pb
from tests.support import transfer_site
from tests.support.transfer_site import CountingChannel, Destination, Site, destination, serving

SENT, RECEIVED = "send", "receive"


class Ended:
    """The log lines of streams that ended, in order."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []
        self._changed = asyncio.Event()

    def handle(self, record: logging.LogRecord) -> bool:
        self.lines.append(vars(record))
        self._changed.set()
        return True

    async def until(self, count: int) -> dict[object, dict[str, object]]:
        """The last line of each side, once there are so many lines."""
        async with asyncio.timeout(transfer_site.PATIENCE_SECONDS):
            while len(self.lines) < count:
                self._changed.clear()
                await self._changed.wait()
        assert len(self.lines) == count
        return {line["side"]: line for line in self.lines}


@pytest.fixture
def ended() -> Iterator[Ended]:
    log, found = logging.getLogger("cache_transfer.transfers"), Ended()
    level = log.level
    log.setLevel(logging.INFO)
    log.addFilter(found.handle)
    yield found
    log.removeFilter(found.handle)
    log.setLevel(level)


def idle(*ends: Transfers) -> bool:
    return not any(list(end) for end in ends)


def of(here: Destination) -> Transfers:
    return here.paths.transfers


async def test_both_ends_of_a_committed_transfer_agree(ended: Ended) -> None:
    registry = CollectorRegistry()
    async with serving() as site, destination(site.address) as here:
        site.store.transfers.metrics = TransferMetrics(registry, Role.PREFILL, site.store.transfers.quarantined)
        of(here).metrics = TransferMetrics(registry_of_decode := CollectorRegistry(), Role.DECODE, of(here).quarantined)
        transfer, _ = site.prompt("t")
        load = asyncio.create_task(here.load("t"))
        for end in (of(here), site.store.transfers):
            await here_has(end, "ready")
        (there,) = site.store.transfers
        assert (there.kv_bytes, there.state_bytes) == (0, 0)
        assert there.total_bytes == sum(site.layout.bytes_necessary(transfer_site.TOKENS))
        site.compute(transfer)
        loaded = await load
        assert [record.phase for record in of(here)] == ["moved"]
        await loaded.close(committed=True)
        said = await ended.until(2)
        assert idle(site.store.transfers, of(here))
    for side, peer in ((SENT, "d0"), (RECEIVED, "p0")):
        line = said[side]
        assert (line["outcome"], line["channel"]) == ("committed", "grpc")
        assert (line["peer"], line["peer_rank"], line["rank"]) == (peer, 0, 0)
        assert (line["request_id"], line["transfer_id"], line["attempt"]) == ("r", "t", 0)
        assert (line["kv_bytes"], line["state_bytes"]) == site.layout.bytes_necessary(transfer_site.TOKENS)
        times = [line[f"{event}_seconds"] for event in EVENTS]
        assert times == sorted(times), "each event has a time, in their order"  # type: ignore[type-var]
    for one, role, side in ((registry, "prefill", SENT), (registry_of_decode, "decode", RECEIVED)):
        labels = {"role": role, "side": side, "channel": "grpc"}
        assert one.get_sample_value("slipstream_worker_streams_total", {**labels, "outcome": "committed"}) == 1
        for kind, count in zip(("kv", "state"), site.layout.bytes_necessary(transfer_site.TOKENS), strict=True):
            assert one.get_sample_value("slipstream_worker_stream_bytes_sum", {**labels, "kind": kind}) == count
        steps = sum(one.get_sample_value("slipstream_worker_stream_seconds_sum", {**labels, "step": step}) or 0.0
                    for step in EVENTS.values())
        assert steps == pytest.approx(said[side]["ended_seconds"], abs=1e-5), "the steps are the whole"
    assert registry_of_decode.get_sample_value("slipstream_worker_channel_choices_total",
                                               {"role": "decode", "channel": "grpc", "result": "chosen"}) == 1


async def here_has(transfers: Transfers, phase: str) -> None:
    """Until the only stream in flight there is in this phase."""
    async with asyncio.timeout(transfer_site.PATIENCE_SECONDS):
        while [record.phase for record in transfers] != [phase]:  # noqa: ASYNC110 (a record tells nobody: that is its point)
            await asyncio.sleep(0.001)


async def fail_at_source(site: Site, here: Destination) -> None:
    transfer, _ = site.prompt("t")
    load = asyncio.create_task(here.load("t"))
    await here_has(site.store.transfers, "ready")
    transfer.fail(CoverageError("spoilt"))
    await load


async def cancel(site: Site, here: Destination) -> None:
    site.prompt("t")
    load = asyncio.create_task(here.load("t"))
    await here_has(site.store.transfers, "ready")
    load.cancel()
    await load


async def be_busy(site: Site, here: Destination) -> None:
    site.prompt("t")
    await here.load("t", where=None)


async def refuse(site: Site, here: Destination) -> None:
    site.prompt("t")
    await here.load("t", refusal=CancelledError("no"))


async def be_late(site: Site, here: Destination) -> None:
    """At both ends; without the wait, whose clock is first would say how it ended at the source: late, or cut off."""
    site.prompt("t")
    end = Leg.end

    async def end_after_the_source(leg: Leg) -> None:
        async with asyncio.timeout(5):
            while not idle(site.store.transfers):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        await end(leg)

    with patch.object(Leg, "end", end_after_the_source):
        await here.load("t", seconds=0.3)


async def come_for_another(site: Site, here: Destination) -> None:
    site.prompt("t")
    await here.load("t", request="other")


async def lose_the_source(site: Site, here: Destination) -> None:
    site.prompt("t")
    load = asyncio.create_task(here.load("t"))
    await here_has(of(here), "ready")
    await site.server.stop(None)
    await load


@pytest.mark.parametrize(("act", "error", "sent", "received"), [
    (fail_at_source, CoverageError, "coverage", "coverage"), (cancel, asyncio.CancelledError, "lost", "cancelled"),
    (be_busy, BusyError, "busy", "busy"), (refuse, CancelledError, "cancelled", "cancelled"),
    (be_late, DeadlineError, "deadline_exceeded", "deadline_exceeded"),
    (come_for_another, TransferError, "protocol", "protocol"), (lose_the_source, TransferError, "lost", "transfer_failed")])
async def test_how_it_ended_at_each_end(act: Callable[[Site, Destination], object], error: type[BaseException], sent: str,
                                        received: str, ended: Ended) -> None:
    async with serving() as site, destination(site.address) as here:
        with pytest.raises(error):
            await act(site, here)  # type: ignore[misc]
        said = await ended.until(2)
        assert (said[SENT]["outcome"], said[RECEIVED]["outcome"]) == (sent, received)
        assert idle(site.store.transfers, of(here))


async def test_a_prompt_that_is_not_needed_and_one_that_a_higher_attempt_takes(ended: Ended) -> None:
    async with serving() as site, destination(site.address) as here:
        transfer, _ = site.prompt("t")
        first = asyncio.create_task(here.load("t"))
        await here_has(site.store.transfers, "ready")
        second = asyncio.create_task(here.load("t", attempt=1))
        with pytest.raises(SlipstreamError):
            await first
        site.compute(transfer)
        await (await second).close(committed=False)
        await ended.until(4)
    outcomes = {(line["side"], line["attempt"]): line["outcome"] for line in ended.lines}
    assert outcomes == {(SENT, 0): "cut", (RECEIVED, 0): "transfer_failed", (SENT, 1): "discarded", (RECEIVED, 1): "discarded"}


class Unsettled(CountingChannel):
    """A source that writes by itself, and cannot say whether its first write still happens."""

    direct = True

    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        raise UnsettledError("a write was given up")


class Fenced(CountingChannel):
    """Its destination, whose fence is not up before the test says so."""

    direct = True

    def __init__(self) -> None:
        super().__init__()
        self.up = asyncio.Event()

    async def fence(self, origin: bytes, invited: bytes) -> None:
        await self.up.wait()


async def test_a_landing_that_is_kept_from_use_stays_in_flight(ended: Ended) -> None:
    registry, channel = CollectorRegistry(), Fenced()

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"slipstream_worker_{name}", {"role": "decode", **labels})

    async with serving(Unsettled()) as site, destination(site.address, channel=channel) as here:
        of(here).metrics = TransferMetrics(registry, Role.DECODE, of(here).quarantined)
        transfer, _ = site.prompt("t")
        load = asyncio.create_task(here.load("t"))
        site.compute(transfer)
        await here_has(of(here), "quarantined")
        assert (shown("quarantined"), shown("quarantines_total", channel="grpc")) == (1, 1), "it counts as it begins"
        assert [(line["side"], line["outcome"]) for line in ended.lines] == [(SENT, "lost")]
        channel.up.set()
        with pytest.raises(TransferError):
            await load
        said = await ended.until(2)
        assert said[RECEIVED]["outcome"] == "transfer_failed"
    assert (shown("quarantined"), shown("quarantines_total", channel="grpc")) == (0, 1)


async def test_channels_that_were_tried_in_vain_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    class Named(CountingChannel):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    async def broken(request: pb.ProbeRequest) -> pb.ProbeReply:
        return pb.ProbeReply(failure="a firewall")

    paths, registry = Paths([Named("local"), Named("rdma"), Named("grpc")]), CollectorRegistry()
    paths.transfers.metrics = TransferMetrics(registry, Role.DECODE, paths.transfers.quarantined)
    way = await paths.choose({"rdma": b"somewhere", "grpc": b""}, "p0", broken)
    assert way.channel.name == "grpc"
    for channel, result in (("local", "not_offered"), ("rdma", "failed"), ("grpc", "chosen")):
        labels = {"role": "decode", "channel": channel, "result": result}
        assert registry.get_sample_value("slipstream_worker_channel_choices_total", labels) == 1
    with pytest.raises(TransferError, match="no channel to p0"):
        await paths.choose({"mori": b"", "rdma": b"somewhere"}, "p0", broken)
    assert caplog.records[-1].levelname == "WARNING"
    assert caplog.records[-1].getMessage().endswith("it offers mori, rdma, this rank local, rdma, grpc")
