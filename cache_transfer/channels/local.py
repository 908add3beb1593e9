"""Same host: the destination reads the source's memory itself (cross-memory attach), one copy and no thread.

The source only says where the bytes lie. Nobody but the destination writes into its memory, so an abort needs no fence; a
source that frees a prompt before it was read spoils what is read: the checksum tells or, without one, the answer to Landed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np

from cache_transfer import spans
from cache_transfer.channels.base import Buffer
from cache_transfer.channels.host import Process
from cache_transfer.spans import Spans
from slipstream.errors import ProtocolError, TransferError

_MOST_SPANS = 1024  # IOV_MAX: of each side in one call


class LocalChannel:
    """Implements Channel."""

    name = "local"
    direct, pulls = False, True
    frame_bytes = 8 << 20  # a millisecond of the event loop
    depth = 1

    def __init__(self) -> None:
        self._here = Process.here()
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)

    def address(self) -> bytes:
        """This process."""
        return self._here.pack()

    async def send(self, to: bytes, source: Spans, target: Spans) -> Sequence[Buffer]:
        """Where the bytes lie."""
        return [source.tobytes()]

    def land(self, origin: bytes, payload: memoryview, target: Spans) -> None:
        """Copy them from there. Raises ProtocolError for a table that does not fit, TransferError if they cannot be read."""
        peer = Process.unpack(origin)
        if not peer.beside(self._here):
            raise TransferError("the source runs on another host, or in another pid namespace")
        if len(payload) % 16:
            raise ProtocolError(f"a table of spans of {len(payload)} bytes")
        ours, theirs = spans.paired(target, np.frombuffer(payload, np.uint64).reshape(-1, 2))
        for first in range(0, len(ours), _MOST_SPANS):
            self._copy(peer.pid, ours[first : first + _MOST_SPANS], theirs[first : first + _MOST_SPANS])

    def _copy(self, pid: int, ours: Spans, theirs: Spans) -> None:
        done = self._read(pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
        if done != spans.total(ours):
            reason = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} of {spans.total(ours)} bytes came"
            raise TransferError(f"cannot read the source's memory (process {pid}): {reason}")

    async def fence(self, origin: bytes, invited: bytes) -> None:
        """Only this process writes here."""

    async def close(self) -> None:
        """Nothing is open."""
