"""The connections between rank 0 of a replica and its other ranks: ordered, typed, and lost when one end falls silent.

A frame is its length (u32, little endian) and a msgpack entry. Rank 0 listens and challenges; the others say who they are, and
are welcomed or refused with the reason. With a token both prove that they know it, and neither says it. Plain sockets: the
engine's thread must not wait for an event loop. Knows no engine, no transfer.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from slipstream.engine.log import Beat, End, Entry
from slipstream.errors import GangError

logger = logging.getLogger(__name__)

Down = TypeVar("Down", bound=Entry)
Up = TypeVar("Up", bound=Entry)

SILENCE_SECONDS = 5.0
BEAT_SECONDS = 1.0
MAX_FRAME_BYTES = 1 << 30
MAX_HELLO_BYTES = 1 << 12
"""Of one who has proved nothing yet."""
NONCE_BYTES = 32

_LENGTH = struct.Struct("<I")


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's first word."""

    nonce: bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Who connects."""

    rank: int
    world: int
    epoch: int
    fingerprint: str
    """Of the model, the geometry and the memory: equal on all ranks."""
    nonce: bytes = b""
    proof: bytes = b""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    problem: str = ""
    """Why it is refused."""
    store_port: int = 0
    """Of the rendezvous of the tensor ranks."""
    proof: bytes = b""


class _Wire:
    """One socket with frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(SILENCE_SECONDS)
        self.sock = sock
        self._writing = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._writing:
            self.sock.sendall(_LENGTH.pack(len(data)) + data)

    def read(self, most_bytes: int = MAX_FRAME_BYTES, deadline: float = math.inf) -> bytes:
        """A frame. `deadline`: of the monotonic clock, for one who might go on drop by drop."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > most_bytes:
            raise GangError(f"a frame of {length} bytes between ranks; the limit is {most_bytes}")
        return self._exactly(length, deadline)

    def _exactly(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            if time.monotonic() > deadline:
                raise GangError("the other rank is too slow")
            part = self.sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise GangError("the other rank has ended")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.sock.close()


class Leader(Generic[Down, Up]):
    """Rank 0's end of all connections."""

    def __init__(self, host: str, port: int, *, world: int, epoch: int, fingerprint: str, up: object, token: str = "") -> None:
        """Listens at once; `port` 0: any free one. `up`: the union of the entries that followers send. Raises GangError."""
        self.world = world
        self._epoch, self._fingerprint, self._token = epoch, fingerprint, token
        self._decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(up)
        self._encoder = msgspec.msgpack.Encoder()
        self._order = threading.Lock()
        self._wires: dict[int, _Wire] = {}
        self._proofs: dict[int, bytes] = {}  # ours to each, told once all have met
        self._closed = threading.Event()
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._server = socket.create_server((host, port), family=family)
        except OSError as error:
            raise GangError(f"rank 0 cannot listen on {host}:{port}: {error}; --master must name an address of this machine "
                            "and a free port") from error
        self.port: int = self._server.getsockname()[1]

    def gather(self, timeout_seconds: float, store_port: int) -> None:
        """Wait for every other rank, then tell them where the tensor ranks meet. One that leaves before that may come again.
        Raises GangError."""
        deadline = time.monotonic() + timeout_seconds
        while len(self._wires) < self.world - 1:
            ready, _, _ = select.select([self._server, *(wire.sock for wire in self._wires.values())], [], [],
                                        max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(1, self.world)) - self._wires.keys())
                raise GangError(f"ranks {missing} of {self.world} did not come within {timeout_seconds:.0f} s; start them with "
                                "the same --master and --epoch")
            for rank, wire in list(self._wires.items()):
                if wire.sock in ready:  # nobody says anything before the Welcome
                    logger.warning("rank %d has left; waiting for it to come again", rank)
                    self._wires.pop(rank).close()
            if self._server in ready:
                self._admit(deadline)
        self._server.close()
        for rank, wire in self._wires.items():
            try:
                wire.write(self._encoder.encode(Welcome(store_port=store_port, proof=self._proofs[rank])))
            except OSError as error:
                raise GangError(f"rank {rank} left before all ranks had met: {error}") from error

    def _admit(self, deadline: float) -> None:
        """Hear who connects."""
        wire = _Wire(self._server.accept()[0])
        try:
            nonce = secrets.token_bytes(NONCE_BYTES)
            wire.write(self._encoder.encode(Challenge(nonce=nonce)))
            said = wire.read(MAX_HELLO_BYTES, min(deadline, time.monotonic() + SILENCE_SECONDS))
            hello = msgspec.msgpack.decode(said, type=Hello)
            ours = b""
            if hmac.compare_digest(hello.proof, _proof(self._token, "follower", nonce, hello.nonce)):
                problem, ours = self._problem(hello), _proof(self._token, "leader", nonce, hello.nonce)
            else:
                problem = f"rank {hello.rank} has another security.token_file, or none"
            if not problem:
                self._wires[hello.rank], self._proofs[hello.rank] = wire, ours
                return
            wire.write(self._encoder.encode(Welcome(problem=problem, proof=ours)))
        except (OSError, GangError, msgspec.MsgspecError) as error:
            problem = f"said no Hello: {error}"
        logger.warning("a rank was refused: %s", problem)
        wire.close()

    def _problem(self, hello: Hello) -> str:
        if hello.epoch != self._epoch:
            return f"rank {hello.rank} is of epoch {hello.epoch}, this replica of {self._epoch}"
        if hello.world != self.world or not 0 < hello.rank < self.world:
            return f"rank {hello.rank} of {hello.world}; this replica has {self.world}"
        if hello.rank in self._wires:
            return f"rank {hello.rank} is here already"
        if hello.fingerprint != self._fingerprint:
            return f"rank {hello.rank} serves another model, or is cut or configured otherwise"
        return ""

    def start(self, on_entry: Callable[[int, Up], None], on_lost: Callable[[str], None]) -> None:
        """Begin to listen to the ranks. Both functions are called on threads of our own; `on_lost` once a rank at most."""
        for rank, wire in self._wires.items():
            threading.Thread(target=self._listen, args=(rank, wire, on_entry, on_lost), daemon=True).start()
        threading.Thread(target=_beat, args=(lambda: self.append(Beat()), self._closed), name="beat", daemon=True).start()

    def append(self, entry: Entry) -> None:
        """Tell every rank, in the same order whoever calls. Raises GangError if one does not take it; the others are told."""
        data = self._encoder.encode(entry)
        problem = ""
        with self._order:
            for rank, wire in self._wires.items():
                try:
                    wire.write(data)
                except OSError as error:
                    problem = f"rank {rank} takes nothing any more: {error}"
        if problem:
            raise GangError(problem)

    def close(self) -> None:
        """Say End and end all connections."""
        self._closed.set()
        with contextlib.suppress(GangError):  # it has ended before
            self.append(End())
        self._server.close()
        for wire in self._wires.values():
            wire.close()

    def _listen(self, rank: int, wire: _Wire, on_entry: Callable[[int, Up], None], on_lost: Callable[[str], None]) -> None:
        try:
            while True:
                entry = self._decoder.decode(wire.read())
                if not isinstance(entry, Beat):
                    on_entry(rank, entry)
        except (OSError, GangError, msgspec.MsgspecError) as error:
            if not self._closed.is_set():
                on_lost(f"rank {rank} is lost: {error}")


def _proof(token: str, who: str, challenge: bytes, nonce: bytes) -> bytes:
    """That `who` knows the token; empty without one."""
    return hmac.digest(token.encode(), who.encode() + challenge + nonce, "sha256") if token else b""


class Follower(Generic[Down]):
    """Another rank's end of its connection."""

    def __init__(self, host: str, port: int, hello: Hello, *, down: object, timeout_seconds: float,
                 token: str = "") -> None:
        """Tries until rank 0 listens. `down`: the union of the entries that it sends. Raises GangError."""
        self._decoder: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(down)
        self._encoder = msgspec.msgpack.Encoder()
        self._closed = threading.Event()
        self._entries: queue.SimpleQueue[Down | GangError] = queue.SimpleQueue()
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                self._wire = _Wire(socket.create_connection((host, port), timeout=SILENCE_SECONDS))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise GangError(f"rank 0 does not answer at {host}:{port}: {error}") from error
                time.sleep(0.1)
        try:
            self._wire.sock.settimeout(SILENCE_SECONDS)
            challenge = msgspec.msgpack.decode(self._wire.read(MAX_HELLO_BYTES), type=Challenge).nonce
            nonce = secrets.token_bytes(NONCE_BYTES)
            hello = msgspec.structs.replace(hello, nonce=nonce, proof=_proof(token, "follower", challenge, nonce))
            self._wire.write(self._encoder.encode(hello))
            self._wire.sock.settimeout(max(SILENCE_SECONDS, deadline - time.monotonic()))  # other ranks may come later
            self.welcome = msgspec.msgpack.decode(self._wire.read(MAX_HELLO_BYTES), type=Welcome)
        except (OSError, GangError, msgspec.MsgspecError) as error:
            raise GangError(f"rank 0 at {host}:{port} left: {error}") from error
        if self.welcome.problem:
            raise GangError(f"rank 0 refused: {self.welcome.problem}")
        if not hmac.compare_digest(self.welcome.proof, _proof(token, "leader", challenge, nonce)):
            raise GangError(f"who listens at {host}:{port} does not know the token of security.token_file")
        self.own_address: str = self._wire.sock.getsockname()[0]
        """Of this machine, on the way to rank 0."""

    def start(self, on_lost: Callable[[str], None]) -> None:
        """Begin to be heard and to listen: from now on silence is a loss. `on_lost` is called on a thread of our own at once,
        whatever this rank does meanwhile: it may be loading, or wait in a step for a rank that is lost."""
        self._wire.sock.settimeout(SILENCE_SECONDS)
        threading.Thread(target=self._listen, args=(on_lost,), name="listen", daemon=True).start()
        threading.Thread(target=_beat, args=(lambda: self.say(Beat()), self._closed), name="beat", daemon=True).start()

    def _listen(self, on_lost: Callable[[str], None]) -> None:
        entry: Entry = Beat()
        try:
            while not isinstance(entry, End):
                entry = self._decoder.decode(self._wire.read())
                if not isinstance(entry, Beat):
                    self._entries.put(entry)
        except (OSError, GangError, msgspec.MsgspecError) as error:
            reason = f"rank 0 is lost: {error}"
            self._entries.put(GangError(reason))
            if not self._closed.is_set():
                on_lost(reason)

    def read(self) -> Down:
        """The next entry; the last one is End. Raises GangError when rank 0 has ended or is silent."""
        entry = self._entries.get()
        if isinstance(entry, GangError):
            raise entry
        return entry

    def say(self, entry: Entry) -> None:
        """Tell rank 0. Raises GangError."""
        try:
            self._wire.write(self._encoder.encode(entry))
        except OSError as error:
            raise GangError(f"rank 0 takes nothing any more: {error}") from error

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._wire.close()


def _beat(beat: Callable[[], None], closed: threading.Event) -> None:
    while not closed.wait(BEAT_SECONDS):
        try:
            beat()
        except GangError:
            return  # whoever listens says so
