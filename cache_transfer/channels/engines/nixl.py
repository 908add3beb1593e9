"""Writes by NIXL over UCX: verbs where there are NICs, cross-memory attach on one host, TCP elsewhere. Knows no other engine.

On one host `close` is no fence: the writing process copies straight into its peer, which has no part in it. Measured: one that
was stopped within `write` (where all of this copying happens) and went on after the peer had closed wrote everything, twice of
twice, and once even called it a success. There only the writer's word, or its death, is the end; UCX_TLS=tcp has the fence.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_transfer.channels.engines.base import CONNECT_SECONDS, Address, Probe, Write, parse, probe_at, wait
from cache_transfer.spans import Spans
from slipstream.errors import TransferError

MODULES = ("nixl_rocm", "rixl", "nixl_cu12", "nixl_cu13")
"""What the builds of NIXL are called, in the order in which they are tried."""
POLL_SECONDS = 0.001
"""Longest wait of a poll for a thread that is posting."""

PROGRESS_MICROSECONDS = 10_000
"""Longest sleep of the progress thread; it is woken by what arrives."""


@dataclass
class _Peer:
    address: bytes
    incarnation: str
    """Its agent's name."""


class NixlEngine:
    """One agent, and where peers write into this process a thread of NIXL's that lands it; one lock, as agents are not safe for
    threads."""

    name = "nixl"

    def __init__(self, *, host: str, process: str, lands: bool) -> None:
        """Raises ImportError if no build of NIXL is installed, TransferError if it does not run here."""
        library = _library()
        self._process = process
        self._incarnation = f"{process}.{secrets.token_hex(8)}"
        self._probe = Probe()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._open: set[_NixlWrite] = set()
        try:
            self._agent: Any = library.nixl_agent(self._incarnation, library.nixl_agent_config(backends=[]))
            _calm(self._agent, lands)
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        except Exception as error:
            raise TransferError(f"NIXL does not run here: {error!r}") from error
        self.register(self._probe.page)

    def register(self, spans: Spans) -> None:
        """See Engine."""
        with self._lock:
            try:
                self._running().register_memory(_rows(spans), "DRAM")
            except Exception as error:
                raise TransferError(f"NIXL cannot register {len(spans)} spans: {error!r}") from error

    def address(self) -> bytes:
        """See Engine."""
        with self._lock:
            contents = bytes(self._running().get_agent_metadata())
        return Address(engine=self.name, process=self._process, incarnation=self._incarnation, probe=self._probe.address,
                       contents=contents).packed()

    def connect(self, address: bytes) -> str:
        """See Engine."""
        parsed = parse(address, self.name)
        with self._lock:
            agent = self._running()
            known = self._peers.get(parsed.process)
            if known is not None and known.address == address:
                return parsed.process
            if known is not None and known.incarnation != parsed.incarnation:
                self._forget(parsed.process)
            try:
                named = agent.add_remote_agent(parsed.contents)
            except Exception as error:
                raise TransferError(f"NIXL cannot reach {parsed.process}: {error!r}") from error
            named = named.decode() if isinstance(named, bytes) else named
            self._peers[parsed.process] = _Peer(address, named)
            if named != parsed.incarnation:
                self._forget(parsed.process)
                raise TransferError(f"the address of {parsed.process} is that of {named}")
        try:
            wait(self.write(parsed.process, self._probe.local(), probe_at(parsed.probe)), CONNECT_SECONDS)
        except TransferError as error:
            with self._lock:
                self._forget(parsed.process)
            raise TransferError(f"cannot write to {parsed.process}: {error}") from error
        return parsed.process

    def write(self, peer: str, local: Spans, remote: Spans) -> Write:
        """See Engine."""
        assert np.array_equal(local[:, 1], remote[:, 1])
        with self._lock:
            agent = self._running()
            if peer not in self._peers:
                raise TransferError(f"{peer} is not connected")
            try:
                handle = agent.initialize_xfer("WRITE", agent.get_xfer_descs(_rows(local), "DRAM"),
                                               agent.get_xfer_descs(_rows(remote), "DRAM"), self._peers[peer].incarnation)
            except Exception as error:
                raise TransferError(f"NIXL refuses these spans of {peer}: {error!r}") from error
            write = _NixlWrite(self, self._peers[peer], peer, handle)
            self._open.add(write)
            self._advance(write, lambda: agent.transfer(handle))  # if it fails poll says so: some of it may be on its way
        return write

    def close(self) -> None:
        """See Engine."""
        with self._lock:
            for write in tuple(self._open):
                self._end(write, f"the engine that writes to {write.peer} was closed")
            self._peers.clear()
            self._agent = None  # nothing else refers to it: its sockets and queue pairs end here

    def progress(self, write: _NixlWrite) -> None:
        """Look how a write is doing, unless another thread is posting."""
        if not self._lock.acquire(timeout=POLL_SECONDS):
            return
        try:
            if write in self._open:
                self._advance(write, lambda: self._agent.check_xfer_state(write.handle))
        finally:
            self._lock.release()

    def _advance(self, write: _NixlWrite, look: Any) -> None:
        """`look` posts or polls. Failure comes as an exception, or as a state."""
        try:
            state = look()
        except Exception as error:
            state = repr(error)
        if state == "DONE":
            self._end(write, None)
        elif state != "PROC":
            self._end(write, f"writing to {write.peer} failed: {state}")
            if self._peers.get(write.peer) is write.to:  # the next connect makes a new way
                self._forget(write.peer)

    def _end(self, write: _NixlWrite, error: str | None) -> None:
        with contextlib.suppress(Exception):  # an active one cannot be; then it goes with the agent
            write.handle.release()
        write.handle, write.over, write.error = None, True, error
        self._open.discard(write)

    def _forget(self, peer: str) -> None:
        with contextlib.suppress(Exception):  # it may have taken itself off already
            self._agent.remove_remote_agent(self._peers[peer].incarnation)
        del self._peers[peer]

    def _running(self) -> Any:
        if self._agent is None:
            raise TransferError("this engine was closed")
        return self._agent


class _NixlWrite:
    """Changed under the engine's lock."""

    def __init__(self, engine: NixlEngine, to: _Peer, peer: str, handle: Any) -> None:
        self.to = to
        self.peer = peer
        self.handle = handle
        self.over = False
        self.error: str | None = None
        self._engine = engine

    def poll(self) -> bool:
        """See Write."""
        if not self.over:
            self._engine.progress(self)
        self.raise_if_failed()
        return self.over

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise TransferError(self.error)


def _calm(agent: Any, lands: bool) -> None:
    """Let the progress thread sleep until bytes come: the Python wrapper has it spin, which costs an idle process a core.

    A process that only writes has none: it would spin on the lock that a post holds (docs/decisions, channels move spans).
    """
    library = sys.modules[type(agent.agent).__module__]
    config = library.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = lands, PROGRESS_MICROSECONDS
    agent.agent = library.nixlAgent(agent.name, config)


def _rows(spans: Spans) -> npt.NDArray[np.uint64]:
    """Address, bytes, device."""
    rows = np.zeros((len(spans), 3), np.uint64)
    rows[:, :2] = spans
    return rows


def _library() -> Any:
    """The first build of NIXL that is installed; what it logs goes where all of the process does. Raises ImportError."""
    missing = []
    for name in MODULES:
        raising = logging.raiseExceptions
        try:
            library = importlib.import_module(name)
        except ImportError as error:
            missing.append(str(error))
            continue
        finally:
            logging.raiseExceptions = raising  # it switches them off for everybody
        its = logging.getLogger("nixl")
        its.handlers.clear()  # to stdout
        its.propagate = True
        return library
    raise ImportError("; ".join(missing))
