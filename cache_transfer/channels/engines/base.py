"""The seam between a channel and the libraries that write into another process's memory. Knows no tensor and no transfer.

What holds for all of them: a write that was posted cannot be called back. Giving it up, forgetting the peer, or deregistering
the memory leaves it to land later; it is over when `poll` says so, when the process that posted it is dead, or (where bytes go
over TCP or verbs) when the process that they go to has closed its engine. Nor does a peer that only stalls ever surface:
deadlines are the caller's.
"""

from __future__ import annotations

import mmap
import time
from typing import Protocol

import msgspec
import numpy as np

from cache_transfer.spans import Spans
from slipstream.errors import IncompatibleError, ProtocolError, TransferError

CONNECT_SECONDS = 5.0
"""Longest wait for the bytes that prove a new way to a peer."""
PROBE_BYTES = 8
MAX_ADDRESS_BYTES = 1 << 20


class Write(Protocol):
    """Posted spans. Whoever posted them polls until they are over, and leaves `local` as it is until then."""

    def poll(self) -> bool:
        """True: all bytes are in the peer's memory. Never waits; raises TransferError if they will not all arrive."""


class Engine(Protocol):
    """Usable from any thread."""

    name: str

    def register(self, spans: Spans) -> None:
        """Memory that this process may read from and its peers may write into, until `close`. Raises TransferError."""

    def address(self) -> bytes:
        """What peers need to reach all that is registered by now."""

    def connect(self, address: bytes) -> str:
        """The peer's name for `write`. Waits for a new peer to answer; a known one costs nothing, one that has restarted
        takes the place of what it was. Raises TransferError if it cannot be reached or is no peer of this engine."""

    def write(self, peer: str, local: Spans, remote: Spans) -> Write:
        """Post pairwise equally long spans, together. May copy before it returns (one host). Raises TransferError if the peer
        is not connected or lost, or if one of its spans is not registered there: then nothing was posted."""

    def close(self) -> None:
        """Let go of everything; what peers wrote over TCP or verbs and has not landed yet never will. Again: nothing."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `Engine.address`."""

    engine: str
    process: str
    """The peer's name, the same after a restart."""
    incarnation: str
    """Another one after every restart."""
    probe: int
    """Where PROBE_BYTES may be written by everybody who connects, to prove the way."""
    contents: bytes
    """What the library says of itself and its memory."""

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)


def parse(address: bytes, engine: str) -> Address:
    """Raises ProtocolError for bytes that are none, IncompatibleError for another engine's."""
    if len(address) > MAX_ADDRESS_BYTES:
        raise ProtocolError(f"an engine address of {len(address)} bytes; at most {MAX_ADDRESS_BYTES}")
    try:
        parsed = msgspec.msgpack.decode(address, type=Address)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no engine address: {error}") from error
    if parsed.engine != engine:
        raise IncompatibleError(f"{parsed.process} writes with {parsed.engine}, this process with {engine}: "
                                "set transfer.rdma.engine to the same on both sides")
    return parsed


class Probe:
    """The few bytes of a process that others write as they connect; on a page of their own, as one may come late."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.address = int(np.frombuffer(self._page, np.uint8).ctypes.data)
        self.page: Spans = np.array([[self.address, mmap.PAGESIZE]], np.uint64)

    def local(self) -> Spans:
        """What is sent."""
        return np.array([[self.address + PROBE_BYTES, PROBE_BYTES]], np.uint64)


def probe_at(address: int) -> Spans:
    """Where a peer takes it."""
    return np.array([[address, PROBE_BYTES]], np.uint64)


def wait(write: Write, seconds: float) -> None:
    """Raises TransferError if the write is not over in time."""
    deadline = time.monotonic() + seconds
    while not write.poll():
        if time.monotonic() > deadline:
            raise TransferError(f"no answer within {seconds:.1f} s")
        time.sleep(0.001)
