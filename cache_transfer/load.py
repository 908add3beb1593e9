"""Destination side: opens a Transfer from each source rank that holds part of this rank's state, lands the bytes, verifies that
nothing is missing. Knows no scheduler.

When `CacheLoader.load` has ended, however it ended, nothing writes into the landing any more: bytes are landed between two
awaits of tasks that are done by then, and a source that writes by itself has said that it has stopped, or is fenced off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio

from cache_transfer import frames, invitation, plan, spans
from cache_transfer.coverage import Coverage
from cache_transfer.handoff import Handoff
from cache_transfer.leg import Leg, is_cancelled, quiet
from cache_transfer.links import IDLE_SECONDS, Links
from cache_transfer.memory import CacheMemory
from cache_transfer.paths import Paths
from cache_transfer.record import CANCELLED, COMMITTED, CUT, DISCARDED, RECEIVE
from cache_transfer.regions import Landing
from slipstream.config import TransferConfig
from slipstream.errors import (
    BusyError,
    CoverageError,
    DeadlineError,
    IncompatibleError,
    InternalError,
    ProtocolError,
    SlipstreamError,
    TransferError,
)
from slipstream.rpc.security import OPEN, Security
from slipstream.sharding import Shard
from slipstream.v1 import cache_store_pb2 as pb

_LATE = "the deadline passed while the prompt's state was on its way"

Admit = Callable[[int], Awaitable[Landing | None]]
"""Prompt tokens -> where they may land, or None: no memory now."""


def given(landing: Landing, num_tokens: int) -> Admit:
    """For a follower, whose rank 0 has decided: the prompt of `num_tokens` lands here. Another prompt raises ProtocolError."""
    async def admit(told: int) -> Landing:
        if told != num_tokens:
            raise ProtocolError(f"the source sends {told} tokens; rank 0 was told {num_tokens}")
        return landing

    return admit


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A prompt whose bytes for this rank are here and verified. The source keeps its copy until `close`."""

    handed: Handoff | None
    """On rank 0."""
    kv_bytes: int
    state_bytes: int
    seconds: float
    """From Begin to the last verified byte."""
    legs: tuple[Leg, ...]

    @property
    def handoff(self) -> Handoff:
        """Rank 0's: how the prompt goes on."""
        assert self.handed is not None, "a follower is told by its rank 0"
        return self.handed

    async def close(self, *, committed: bool) -> None:
        """Tell the source that its copy may go. Never raises: a source that died needs no telling."""
        for leg in self.legs:
            leg.record.end(time.monotonic(), COMMITTED if committed else DISCARDED)
        await asyncio.gather(*(leg.part(frames.control(done=pb.Done(committed=committed))) for leg in self.legs))
        await asyncio.gather(*(leg.end() for leg in self.legs))


class _Arrival:
    """What the streams of one load have in common."""

    def __init__(self, admit: Admit) -> None:
        self.began = 0.0
        self.num_tokens = 0
        self.streams: list[asyncio.Task[Loaded]] = []
        self.legs: dict[asyncio.Task[Any] | None, Leg] = {}  # by the stream that reads it
        self._admit = admit
        self._landing: Landing | None = None
        self._decided = asyncio.Event()

    async def place(self, num_tokens: int, *, decides: bool) -> Landing | None:
        """Where the prompt may land. It is asked once, by the stream that `decides`."""
        if decides:
            self.began, self.num_tokens = time.monotonic(), num_tokens
            self._landing = await self._admit(num_tokens)
            self._decided.set()
        await self._decided.wait()
        if num_tokens != self.num_tokens:
            raise ProtocolError(f"the source's ranks send {self.num_tokens} and {num_tokens} tokens of one prompt")
        return self._landing

    def stop(self) -> None:
        """No stream but the one that calls writes into the landing from now on."""
        for stream in self.streams:
            if stream is not asyncio.current_task():
                stream.cancel()


class CacheLoader:
    """One per rank."""

    def __init__(self, memory: CacheMemory, paths: Paths, *, replica_id: str, epoch: int, rank: int,
                 config: TransferConfig, idle_seconds: float = IDLE_SECONDS, security: Security = OPEN) -> None:
        """`idle_seconds`: after so long without use a connection to a source is closed."""
        assert rank == memory.shard.rank
        self._replica_id = replica_id
        self._memory = memory
        self._paths = paths
        self._geometry = frames.geometry_to_pb(memory.shard.geometry)
        layout = memory.layout
        hello = pb.HelloRequest(replica_id=replica_id, epoch=epoch, rank=rank, geometry=self._geometry,
                                layout=pb.Layout(hash=layout.hash, fields=layout.fields()))
        self._links = Links(hello, layout, paths, connect_seconds=config.connect_seconds, idle_seconds=idle_seconds,
                            security=security)

    async def close(self) -> None:
        """Close every connection, and this rank's channels; loads that still run fail."""
        await self._links.close()
        await self._paths.close()

    async def load(self, addresses: Sequence[str], *, transfer_id: str, attempt: int, source_epoch: int, request_id: str,
                   remaining_seconds: float, admit: Admit) -> Loaded:
        """Bring a prompt's state here: all that this rank holds of it, or nothing.

        `addresses`: the CacheStore of each source rank, by rank. `admit` is asked once, when the lowest of the ranks that this
        one reads from has begun. Raises BusyError if it gave None, DeadlineError, IncompatibleError, CoverageError, the error
        that a source rank names, or TransferError for a lost link. Cancelling it tells each of them.
        """
        deadline = asyncio.get_running_loop().time() + remaining_seconds
        opened = pb.Open(transfer_id=transfer_id, attempt=attempt, epoch=source_epoch, request_id=request_id,
                         compatibility_hash=self._memory.layout.hash, geometry=self._geometry, rank=self._memory.shard.rank,
                         replica_id=self._replica_id)
        arrival = _Arrival(admit)
        loaded: Loaded | None = None
        outcome = CUT  # of streams that did not end by themselves
        try:
            async with asyncio.timeout_at(deadline):
                source = await self._source(addresses, source_epoch)
                copies = plan.plan(self._memory.layout, source.geometry, self._memory.shard)
                for rank in copies:
                    stream = asyncio.create_task(self._stream(addresses[rank], replace(source, rank=rank), copies[rank], opened,
                                                              deadline, arrival, decides=rank == min(copies)))
                    stream.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                    arrival.streams.append(stream)
                done, _ = await asyncio.wait(arrival.streams, return_when=asyncio.FIRST_EXCEPTION)
            parts = [stream.result() for stream in done if not stream.cancelled()]
            loaded = Loaded(handed=next((part.handed for part in parts if part.handed), None),
                            kv_bytes=sum(part.kv_bytes for part in parts), state_bytes=sum(part.state_bytes for part in parts),
                            seconds=max(part.seconds for part in parts), legs=tuple(arrival.legs.values()))
            return loaded
        except TimeoutError as error:
            outcome = DeadlineError.code
            raise DeadlineError(_LATE) from error
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        finally:
            if loaded is None:
                arrival.stop()
                await quiet(tuple(arrival.legs.values()), arrival.streams, request_id)
                for reader, leg in arrival.legs.items():
                    leg.record.end(time.monotonic(), _failure(reader) or outcome)

    async def _source(self, addresses: Sequence[str], epoch: int) -> Shard:
        """The source's rank 0. Raises IncompatibleError unless the addresses are those of all of its ranks."""
        if not addresses:
            raise IncompatibleError("the source has no address")
        async with self._links.use(addresses[0], epoch) as link:
            if link.shard.geometry.world != len(addresses):
                raise IncompatibleError(f"{len(addresses)} addresses of the source are given; it is {link.shard.geometry}")
            return replace(link.shard, rank=0)

    async def _stream(self, address: str, source: Shard, copies: Sequence[plan.Copy], opened: pb.Open, deadline: float,
                      arrival: _Arrival, *, decides: bool) -> Loaded:
        """Read one source rank's part."""
        leg: Leg | None = None
        try:
            async with self._links.use(address, opened.epoch) as link:
                if link.shard != source:
                    raise IncompatibleError(f"at {address} is rank {link.shard.rank} of {link.shard.geometry}, not rank "
                                            f"{source.rank} of {source.geometry}")
                left = max(0.001, deadline - asyncio.get_running_loop().time())
                leg = Leg(link, left, self._paths.transfers.open(
                    RECEIVE, request_id=opened.request_id, transfer_id=opened.transfer_id, attempt=opened.attempt,
                    rank=opened.rank, peer=link.replica_id, peer_rank=source.rank, channel=link.way.channel.name,
                    now=time.monotonic()))
                arrival.legs[asyncio.current_task()] = leg
                opening = pb.Open(remaining_ms=max(1, int(left * 1000)), channel=leg.way.channel.name,
                                  address=leg.address)
                opening.MergeFrom(opened)
                await leg.write(frames.control(open=opening))
                memory = self._memory.narrowed([(copy.spec, copy.at_destination) for copy in copies])
                return await self._receive(leg, memory, arrival, decides=decides,
                                           leads=source.rank == self._memory.shard.rank == 0)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineError(_LATE) from error
            so_far = f"; {leg.progress}" if leg is not None else ""
            raise TransferError(f"the Transfer from {address} broke: {error.code().name} {error.details()}{so_far}") from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise TransferError(f"the source at {address} cut the Transfer off") from None

    async def _receive(self, leg: Leg, memory: CacheMemory, arrival: _Arrival, *, decides: bool, leads: bool) -> Loaded:
        num_tokens = (await self._expect(leg, "begin")).begin.num_tokens
        leg.record.begun = time.monotonic()
        try:
            landing = await arrival.place(num_tokens, decides=decides)
            if landing is None:
                await leg.part(frames.control(busy=pb.Busy(reason="no memory for the prompt and its output")))
                raise BusyError("the decode replica has no memory for this request now", retry_after_seconds=0.1)
            coverage = Coverage(memory, num_tokens, landing.have_tokens)
            leg.record.ready, leg.record.coverage = time.monotonic(), coverage
            leg.invited = leg.way.channel.direct
            where = invitation.to_pb(memory.regions, landing) if leg.invited else None
            await leg.write(frames.control(ready=pb.Ready(have_tokens=landing.have_tokens, invitation=where)))
            handoff = await self._land(leg, memory, landing, coverage, leads=leads)
            return Loaded(handed=handoff, kv_bytes=coverage.kv_bytes, state_bytes=coverage.state_bytes,
                          seconds=time.monotonic() - arrival.began, legs=(leg,))
        except (grpc.aio.AioRpcError, BusyError):
            raise
        except Exception as error:
            arrival.stop()
            told = error if isinstance(error, SlipstreamError) else InternalError(f"the destination failed: {error!r}")
            await leg.part(frames.control(failed=pb.Failed(code=told.code, message=told.message)))
            raise

    async def _land(self, leg: Leg, memory: CacheMemory, landing: Landing, coverage: Coverage, *,
                    leads: bool) -> Handoff | None:
        """Until a stream's part is here and verified; the Handoff of the one that leads."""
        handoff: Handoff | None = None
        unproven = False  # bytes were read here from a memory that the source may have given up before
        while True:
            frame = frames.parse(await leg.read())
            if isinstance(frame, frames.Data):
                coverage.check(frame.ranges)
                target = memory.spans(landing, frame.ranges)
                leg.way.channel.land(leg.way.peer, frame.payload, target)
                unproven |= leg.way.channel.pulls and frame.checksum is None
                if frame.checksum is not None and frame.checksum != spans.checksum(target):
                    raise CoverageError(f"{memory.named(frame.ranges)}: the checksum of the bytes that arrived is not that of "
                                        "those that were sent")
                coverage.add(frame.ranges)
                if leg.record.first_byte is None:
                    leg.record.first_byte = time.monotonic()
                if coverage.kv_bytes + coverage.state_bytes == coverage.total_bytes:
                    leg.record.last_byte = time.monotonic()
                continue
            leg.over |= frame.WhichOneof("message") in ("failed", "sent")
            match frame.WhichOneof("message"):
                case "handoff" if handoff is None and leads:
                    handoff = frames.handoff_from_pb(frame.handoff)
                case "failed":
                    raise leg.failure(frame.failed)
                case "sent":
                    if leads:
                        _check(handoff, coverage.num_tokens)
                    if handoff is None or not handoff.finished:  # a finished prompt's bytes are not needed, nor all sent
                        coverage.verify(frame.sent.kv_bytes, frame.sent.state_bytes)
                        if unproven:
                            unproven = False
                            await leg.write(frames.control(landed=pb.Landed()))
                            continue
                    return handoff
                case other:
                    raise ProtocolError(f"{other} in the middle of a transfer")

    async def _expect(self, leg: Leg, kind: str) -> pb.Control:
        frame = frames.parse(await leg.read())
        if isinstance(frame, frames.Data):
            raise ProtocolError(f"data before {kind}")
        if frame.WhichOneof("message") == "failed":
            raise leg.failure(frame.failed)
        if frame.WhichOneof("message") != kind:
            raise ProtocolError(f"{frame.WhichOneof('message')} instead of {kind}")
        return frame


def _failure(stream: asyncio.Task[Any] | None) -> str:
    """The code of what a stream failed of by itself; empty: it did not."""
    if stream is None or not stream.done() or stream.cancelled() or (error := stream.exception()) is None:
        return ""
    return error.code if isinstance(error, SlipstreamError) else InternalError.code


def _check(handoff: Handoff | None, num_tokens: int) -> None:
    if handoff is None:
        raise CoverageError("the transfer ended without a Handoff")
    if handoff.prompt_tokens != num_tokens or handoff.state_token_count != num_tokens:
        raise CoverageError(f"the Handoff is for {handoff.prompt_tokens} tokens with a state after "
                            f"{handoff.state_token_count}; the prompt has {num_tokens}")
