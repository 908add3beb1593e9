"""The channels of one rank, and the choice of one for each peer: by preference, by what both sides offer, and by trying it.

A channel that is offered may still not work (a port that a firewall closes, a library that disagrees with the kernel), so a
pair of ranks moves one small block before it uses one; what fails is logged with its reason and the next is tried.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from cache_transfer import spans
from cache_transfer.channels.base import Channel, LostError
from cache_transfer.channels.engines import choose_engine, environment
from cache_transfer.channels.faults import Faults, Write
from cache_transfer.channels.grpc import InlineChannel
from cache_transfer.channels.local import LocalChannel
from cache_transfer.channels.rdma import RdmaChannel
from cache_transfer.spans import Spans
from cache_transfer.transfers import Transfers
from slipstream.config import TransferConfig
from slipstream.errors import IncompatibleError, SlipstreamError, TransferError
from slipstream.v1 import cache_store_pb2 as pb

logger = logging.getLogger(__name__)

PROBE_BYTES = 4096

Ask = Callable[[pb.ProbeRequest], Awaitable[pb.ProbeReply]]


@dataclass(frozen=True)
class Way:
    """A channel to one peer."""

    channel: Channel
    peer: bytes
    """Its address on the channel."""


class Paths:
    """One per rank, shared by its source and its destination side."""

    def __init__(self, channels: Sequence[Channel], probe: Probe | None = None, faults: Faults | None = None) -> None:
        """`channels`: the one to be preferred first. `probe`: memory that they can move. `faults`: of all that goes out."""
        self._channels = {channel.name: channel if faults is None else faults.channel(channel) for channel in channels}
        self.offers = [f"{channel.name}/{channel.engine}" if isinstance(channel, RdmaChannel) else channel.name
                       for channel in channels]
        """What a peer has to offer too, one of them, for the router and the log."""
        self.transfers = Transfers()
        """What moves on them, both ways."""
        self._probe = probe or Probe()
        self._faults = faults
        self._probing = asyncio.Lock()  # of this side as a source
        self._asking = asyncio.Lock()

    def addresses(self) -> dict[str, bytes]:
        """By channel, for a Hello."""
        return {name: channel.address() for name, channel in self._channels.items()}

    def way(self, name: str, peer: bytes) -> Way:
        """Source: the way that a destination has chosen. Raises IncompatibleError if it was not offered."""
        if name not in self._channels:
            raise IncompatibleError(f"the destination chose channel {name!r}; offered were {', '.join(self._channels)}")
        return Way(self._channels[name], peer)

    async def answer(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        """Source: move a block as a Transfer would."""
        try:
            channel = self.way(request.channel, request.address).channel
            async with self._probing:
                self._probe.fill(request.nonce)
                target = spans.of((request.target, PROBE_BYTES)) if channel.direct else spans.EMPTY
                payload = await channel.send(request.address, self._probe.outgoing, target)
                return pb.ProbeReply(payload=b"".join(payload))
        except (SlipstreamError, LostError) as error:
            return pb.ProbeReply(failure=str(error))

    async def choose(self, theirs: Mapping[str, bytes], peer: str, ask: Ask) -> Way:
        """Destination: the first of our channels that the source offers and that moves a block. `peer`: for the log.

        Raises TransferError that names why each failed.
        """
        failed: list[str] = []
        for name, channel in self._channels.items():
            if name not in theirs:
                failed.append(f"{name}: {peer} does not offer it")
                self.transfers.tried(name, "not_offered")
                continue
            reason = await self._try(channel, theirs[name], ask)
            self.transfers.tried(name, "failed" if reason else "chosen")
            if not reason:
                logger.info("%s is read by %s%s", peer, name, f" ({'; '.join(failed)})" if failed else "")
                return Way(channel, theirs[name])
            logger.warning("%s cannot be read by %s: %s", peer, name, reason)
            failed.append(f"{name}: {reason}")
        logger.warning("there is no channel to %s: it offers %s, this rank %s", peer, ", ".join(theirs), ", ".join(self.offers))
        raise TransferError(f"there is no channel to {peer}: {'; '.join(failed)}")

    async def _try(self, channel: Channel, peer: bytes, ask: Ask) -> str:
        """Why it does not work; empty if it does."""
        if not peer:  # it is the connection on which we ask
            return ""
        async with self._asking:
            nonce = secrets.token_bytes(16)
            target = self._probe.incoming
            reply = await ask(pb.ProbeRequest(channel=channel.name, address=channel.address(), nonce=nonce,
                                              target=int(target[0, 0])))
            if reply.failure:
                return reply.failure
            try:
                channel.land(peer, memoryview(reply.payload), target)
            except SlipstreamError as error:
                return error.message
            return "" if self._probe.holds(nonce) else "another block came than was sent"

    def writer(self, write: Write) -> Write:
        """Source: what writes a stream's frames."""
        return write if self._faults is None else self._faults.writer(write)

    async def close(self) -> None:
        """End every channel."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))


class Probe:
    """Memory that a probe is read from, and memory that it lands in."""

    def __init__(self) -> None:
        self._memory = np.zeros(2 * PROBE_BYTES, np.uint8)
        self.extent: Spans = spans.of((spans.address_of(self._memory), 2 * PROBE_BYTES))
        self.outgoing: Spans = spans.of((spans.address_of(self._memory), PROBE_BYTES))
        self.incoming: Spans = spans.of((spans.address_of(self._memory) + PROBE_BYTES, PROBE_BYTES))

    def fill(self, nonce: bytes) -> None:
        """What goes out. Raises IncompatibleError for a nonce of another size."""
        if len(nonce) != 16:
            raise IncompatibleError(f"a probe's nonce has 16 bytes, not {len(nonce)}")
        self._memory[:PROBE_BYTES] = np.frombuffer(nonce * (PROBE_BYTES // 16), np.uint8)

    def holds(self, nonce: bytes) -> bool:
        """True if this came in."""
        return self._memory[PROBE_BYTES:].tobytes() == nonce * (PROBE_BYTES // 16)


def open_paths(config: TransferConfig, extent: Spans, *, process: str, host: str = "127.0.0.1", lands: bool = True) -> Paths:
    """The channels that `config` names, best first.

    `extent`: the memory that they move. `process`: this one's name among its peers. `host`: the address that an engine binds.
    `lands`: false for a rank that is only a source.
    Raises ConfigError.
    """
    probe = Probe()

    def rdma() -> Channel:
        environment.set_environment(os.environ, host)  # it is read when an engine is loaded
        return RdmaChannel(lambda: choose_engine(config.rdma.engine, host=host, process=process, lands=lands),
                           spans.joined([extent, probe.extent]), stall_seconds=config.stall_seconds,
                           quarantine_seconds=config.rdma.quarantine_seconds)

    make: dict[str, Callable[[], Channel]] = {"local": LocalChannel, "rdma": rdma,
                                              "grpc": lambda: InlineChannel(config.frame_bytes)}
    on = {key: value for key, value in asdict(config.faults).items() if value and key != "seed"}
    faults = Faults(config.faults) if on else None
    if on:
        logger.warning("[transfer.faults] is on, and makes sick what this rank sends: %s",
                       ", ".join(f"{key}={value}" for key, value in on.items()))
    if config.channel != "auto":
        return Paths([make[config.channel]()], probe, faults)
    channels = []
    for name in make:
        if name == "rdma" and not any(environment.RDMA_DEVICES.glob("*")):
            continue  # over TCP an engine gains little and keeps a thread busy
        try:
            channels.append(make[name]())
        except SlipstreamError as error:
            logger.warning("channel %s is left out: %s", name, error.message)
    return Paths(channels, probe, faults)
