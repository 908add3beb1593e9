"""What every write engine does, between two real processes: the cases that a test file runs on one engine by subclassing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.support.write_peer import Peer

SIZE = 1 << 22
LARGE, TIMES = 1 << 26, 256
"""A buffer, and how often a flood writes it: 16 GiB, which nothing here waits for."""
Start = Callable[..., Peer]


class WriteEngineContract:
    engine = ""
    kept_per_restart = 0
    """File descriptors that the library keeps for each peer that has restarted."""

    @pytest.fixture
    def start(self) -> Iterator[Start]:
        """Starts a peer: `start("a", size, UCX_TLS="tcp")`."""
        running: list[Peer] = []

        def start(process: str, size: int = SIZE, **env: str) -> Peer:
            running.append(Peer(self.engine, process, size, env))
            return running[-1]

        yield start
        for peer in running:
            peer.kill()

    @pytest.mark.parametrize("tls", ["tcp", "all"])
    def test_random_spans_arrive(self, start: Start, tls: str) -> None:
        """All bytes are there as soon as a poll says so, none lies beside its span, and many spans are one post."""
        source, target = start("p0/0", UCX_TLS=tls), start("d0/0", UCX_TLS=tls)
        source.ask("fill", seed=1)
        sent = bytes.fromhex(source.ask("read", at=0, size=SIZE))
        name, to = source.ask("connect", address=target.ask("address")), target.ask("memory")
        assert name == "d0/0"
        random = np.random.default_rng(7)
        for count in (1, 2, 37, 1024, 1025, 4099):
            target.ask("sentinel")
            expected = bytearray(b"\xee" * SIZE)
            room = SIZE // count
            sizes = random.integers(1, room + 1, count).tolist()
            from_, into = random.permutation(count).tolist(), random.permutation(count).tolist()
            local, remote = [], []
            for size, a, b in zip(sizes, from_, into, strict=True):
                local.append([a * room, size])
                remote.append([to + b * room, size])
                expected[b * room : b * room + size] = sent[a * room : a * room + size]
            write = source.ask("write", peer=name, local=local, remote=remote)
            assert source.ask("poll", write=write, seconds=30)[0]
            assert bytes.fromhex(target.ask("read", at=0, size=SIZE)) == expected
        assert source.leave() == target.leave() == 0

    def test_both_ways_at_once(self, start: Start) -> None:
        one, two = start("a", LARGE, UCX_TLS="tcp"), start("b", LARGE, UCX_TLS="tcp")
        writes = []
        for source, target in ((one, two), (two, one)):
            name = source.ask("connect", address=target.ask("address"))
            writes.append((source, source.ask("flood", peer=name, to=target.ask("memory"), times=1)))
        for source, write in writes:
            assert source.ask("poll", write=write, seconds=30)[0]

    def test_a_stopped_peer_is_not_noticed_and_a_killed_one_is_at_once(self, start: Start) -> None:
        source, target = start("a", LARGE, UCX_TLS="tcp"), start("b", LARGE, UCX_TLS="tcp")
        name = source.ask("connect", address=target.ask("address"))
        write = source.ask("flood", peer=name, to=target.ask("memory"), times=TIMES)
        target.stop()
        over, _, longest = source.ask("poll", write=write, seconds=2)
        assert not over
        assert longest < 0.5
        target.kill()
        before = time.monotonic()
        with pytest.raises(RuntimeError, match=r"transfer_failed: writing to b failed"):
            source.ask("poll", write=write, seconds=20)
        assert time.monotonic() - before < 5
        with pytest.raises(RuntimeError, match="b is not connected"):
            source.ask("flood", peer=name, to=0, times=1)

    def test_a_peer_that_is_killed_amid_writes_and_starts_again(self, start: Start) -> None:
        source, target = start("a", LARGE, UCX_TLS="tcp"), start("b", LARGE, UCX_TLS="tcp")
        address, to = target.ask("address"), target.ask("memory")
        name = source.ask("connect", address=address)
        writes = [source.ask("flood", peer=name, to=to, times=TIMES) for _ in range(3)]
        target.kill()
        for write in writes:
            with pytest.raises(RuntimeError, match="writing to b failed"):
                source.ask("poll", write=write, seconds=20)
        with pytest.raises(RuntimeError, match="transfer_failed"):
            source.ask("connect", address=address)
        again = start("b", LARGE, UCX_TLS="tcp")
        assert source.ask("connect", address=again.ask("address")) == name
        self._arrives(source, again, name)

    def test_a_source_that_is_killed_leaves_its_peer_well(self, start: Start) -> None:
        source, target, other = (start(name, LARGE, UCX_TLS="tcp") for name in ("a", "b", "c"))
        name = source.ask("connect", address=target.ask("address"))
        target.ask("sentinel")
        source.ask("flood", peer=name, to=target.ask("memory"), times=TIMES)
        target.ask("await_landing")
        source.kill()
        name = other.ask("connect", address=target.ask("address"))
        self._arrives(other, target, name)

    def test_a_restart_replaces_what_was(self, start: Start) -> None:
        """Twenty of them leave neither file descriptors nor threads, and a known address costs nothing."""
        source, target = start("a", UCX_TLS="tcp"), start("b", UCX_TLS="tcp")
        held = []
        for _ in range(20):
            target.ask("renew")
            address = target.ask("address")
            name = source.ask("connect", address=address)
            before = time.monotonic()
            for _ in range(50):
                assert source.ask("connect", address=address) == name
            assert time.monotonic() - before < 1
            self._arrives(source, target, name)
            held.append((source.ask("held"), target.ask("held")))
        for fewer, more in zip(held[3], held[-1], strict=True):
            assert max(np.subtract(more, fewer)) <= 1 + 16 * self.kept_per_restart, held

    def test_only_registered_memory_is_written(self, start: Start) -> None:
        """A refusal harms neither side; one bad span of many is enough."""
        source, target = start("a"), start("b")
        name, to = source.ask("connect", address=target.ask("address")), target.ask("memory")
        target.ask("sentinel")
        for bad in ([to + SIZE - 32, 64], [4096, 64], [to - 64, 64]):
            with pytest.raises(RuntimeError, match="transfer_failed"):
                self._refused(source, name, [[0, 64], [0, 64]], [[to, 64], bad])
        source.ask("connect", address=target.ask("address"))
        self._arrives(source, target, name)

    def _refused(self, source: Peer, name: str, local: list[list[int]], remote: list[list[int]]) -> None:
        source.ask("poll", write=source.ask("write", peer=name, local=local, remote=remote), seconds=20)

    def _arrives(self, source: Peer, target: Peer, name: str) -> None:
        source.ask("fill", seed=3)
        target.ask("sentinel")
        write = source.ask("write", peer=name, local=[[0, 1 << 20]], remote=[[target.ask("memory") + 4096, 1 << 20]])
        assert source.ask("poll", write=write, seconds=20)[0]
        assert target.ask("read", at=4096, size=1 << 20) == source.ask("read", at=0, size=1 << 20)

    @pytest.mark.parametrize("address", [b"", b"nonsense", b"\xc1" * 40, bytes((1 << 20) + 1)])
    def test_what_is_no_address_is_refused(self, start: Start, address: bytes) -> None:
        with pytest.raises(RuntimeError, match="protocol: "):
            start("a").ask("connect", address=address.hex())

    def test_nothing_can_be_done_once_it_is_closed(self, start: Start) -> None:
        source, target = start("a"), start("b")
        name = source.ask("connect", address=target.ask("address"))
        source.ask("close")
        for command in ({"command": "connect", "address": target.ask("address")},
                        {"command": "flood", "peer": name, "to": target.ask("memory"), "times": 1}):
            with pytest.raises(RuntimeError, match="closed"):
                source.ask(**command)

    def late(self, start: Start, *, close: bool) -> int:
        """Bytes that a source which was stopped amid a write, and goes on later, still writes over a sentinel."""
        source, target = start("a", LARGE, UCX_TLS="tcp"), start("b", LARGE, UCX_TLS="tcp")
        name = source.ask("connect", address=target.ask("address"))
        target.ask("sentinel")
        write = source.ask("flood", peer=name, to=target.ask("memory"), times=TIMES)
        target.ask("await_landing")
        source.stop()
        time.sleep(0.3)  # what is on its way arrives
        if close:
            target.ask("close")
        target.ask("sentinel")
        source.go_on()
        if close:
            with pytest.raises(RuntimeError, match="writing to b failed"):
                source.ask("poll", write=write, seconds=40)
        else:
            target.ask("await_landing")
        late: int = target.ask("changed")
        return late

    def test_closing_fences_what_comes_late(self, start: Start) -> None:
        assert self.late(start, close=True) == 0

    def test_without_closing_it_lands(self, start: Start) -> None:
        """What the fence is for."""
        assert self.late(start, close=False) > 0

    def test_an_idle_engine_leaves_the_processor_alone(self, start: Start) -> None:
        peers = [start("a"), start("b")]
        peers[0].ask("connect", address=peers[1].ask("address"))
        assert max(peer.ask("idle", seconds=2) for peer in peers) < 0.1
