"""Writes by Mooncake's transfer engine: verbs where there are NICs, TCP elsewhere. Knows no other engine.

The library tells of a batch only by waiting for it, so each peer has a thread that posts and waits, one batch at a time. A
peer that stalls is given up by the library after half a minute; what it was sent may land even then.

Weaknesses of the library (0.3.13): it listens on every interface, without authentication, whatever MC_TCP_BIND_ADDRESS says; it
keeps one file descriptor for every peer that has restarted; it says why it failed on stderr only.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np

from cache_transfer.channels.engines.base import CONNECT_SECONDS, Address, Probe, Write, parse, probe_at, wait
from cache_transfer.channels.engines.environment import RDMA_DEVICES
from cache_transfer.spans import Spans
from slipstream.errors import TransferError

logger = logging.getLogger(__name__)

MAX_BATCH = 1024
"""Spans of one call: the library refuses what exceeds its queue of 2,048."""


class MooncakeEngine:
    """One transfer engine of the library."""

    name = "mooncake"

    def __init__(self, *, host: str, process: str, lands: bool) -> None:
        """Raises ImportError if Mooncake, or a library that it needs, is missing; TransferError if it does not run here."""
        library = importlib.import_module("mooncake.engine")
        self._process = process
        self._incarnation = secrets.token_hex(8)
        self._probe = Probe()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._engine: Any = library.TransferEngine()
        host = f"[{host}]" if ":" in host else host
        protocol = "rdma" if any(RDMA_DEVICES.glob("*")) else "tcp"
        if status := self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise TransferError(f"Mooncake does not run here over {protocol}: status {status}; its log is on stderr")
        if protocol == "tcp":
            logger.warning("Mooncake listens on every interface, whatever address it is given, and authenticates nobody: let a "
                           "firewall keep others from its ports")
        self._segment = f"{host}:{self._engine.get_rpc_port()}"
        self._spans: list[Spans] = []
        self.register(self._probe.page)

    def register(self, spans: Spans) -> None:
        """See Engine."""
        with self._lock:
            if status := self._running().batch_register_memory(spans[:, 0].tolist(), spans[:, 1].tolist()):
                raise TransferError(f"Mooncake cannot register {len(spans)} spans: status {status}; its log is on stderr")
            self._spans.append(spans)

    def address(self) -> bytes:
        """See Engine."""
        return Address(engine=self.name, process=self._process, incarnation=self._incarnation, probe=self._probe.address,
                       contents=self._segment.encode()).packed()

    def connect(self, address: bytes) -> str:
        """See Engine."""
        parsed = parse(address, self.name)
        with self._lock:
            known = self._peers.get(parsed.process)
            if known is not None and known.incarnation == parsed.incarnation and not known.lost:
                return parsed.process
            if known is not None:
                known.leave()
            peer = self._peers[parsed.process] = _Peer(self._running(), parsed)
        for attempts_left in (1, 0):  # the first probe of a process that has restarted was seen to fail, rarely (1 in 140)
            try:
                wait(peer.write(self._probe.local(), probe_at(parsed.probe)), CONNECT_SECONDS)
                break
            except TransferError as error:
                if peer.lost and attempts_left:
                    peer.lost = False
                    continue
                peer.leave()
                raise TransferError(f"cannot write to {parsed.process}: {error}") from error
        return parsed.process

    def write(self, peer: str, local: Spans, remote: Spans) -> Write:
        """See Engine."""
        assert np.array_equal(local[:, 1], remote[:, 1])
        with self._lock:
            self._running()
            if peer not in self._peers or self._peers[peer].lost:
                raise TransferError(f"{peer} is not connected")
            return self._peers[peer].write(local, remote)

    def close(self) -> None:
        """See Engine."""
        with self._lock:
            if self._engine is None:
                return
            for peer in self._peers.values():
                peer.leave()
            self._peers.clear()
            for spans in self._spans:
                self._engine.batch_unregister_memory(spans[:, 0].tolist())
            self._engine = None

    def _running(self) -> Any:
        if self._engine is None:
            raise TransferError("this engine was closed")
        return self._engine


class _Peer:
    """Its thread ends with `leave`, or with the process: it is never waited for."""

    def __init__(self, engine: Any, address: Address) -> None:
        self.incarnation = address.incarnation
        self.lost = False
        """A write failed: the next connect makes a new way."""
        self._name = address.process
        self._queue: SimpleQueue[_MooncakeWrite | None] = SimpleQueue()
        segment = address.contents.decode(errors="replace")
        threading.Thread(target=self._run, args=(engine, segment), name=f"mooncake-{self._name}", daemon=True).start()

    def write(self, local: Spans, remote: Spans) -> _MooncakeWrite:
        write = _MooncakeWrite(local, remote)
        self._queue.put(write)
        return write

    def leave(self) -> None:
        self.lost = True
        self._queue.put(None)

    def _run(self, engine: Any, segment: str) -> None:
        while (write := self._queue.get()) is not None:
            local, remote = write.local, write.remote
            for at in range(0, len(local), MAX_BATCH):
                part = slice(at, at + MAX_BATCH)
                status = -1 if self.lost else engine.batch_transfer_sync_write(
                    segment, local[part, 0].tolist(), remote[part, 0].tolist(), local[part, 1].tolist())
                if status:
                    self.lost = True
                    write.error = f"writing to {self._name} failed: status {status}"
                    break
            write.over = True


class _MooncakeWrite:
    """Changed by its peer's thread alone."""

    def __init__(self, local: Spans, remote: Spans) -> None:
        self.local = local
        self.remote = remote
        self.over = False
        self.error: str | None = None

    def poll(self) -> bool:
        """See Write."""
        if self.error is not None:
            raise TransferError(self.error)
        return self.over
