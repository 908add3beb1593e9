"""The connections between the ranks of a replica: who may come, the order of entries, how a loss is found."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.engine.log import CopyBlock, CopyState, End
from slipstream.errors import GangError
from worker import link, ranks
from worker.entries import Down, LoadEnded, Serving, Up
from worker.link import Challenge, Follower, Hello, Leader, Welcome


def hello(rank: int = 1, **changed: Any) -> Hello:
    return msgspec.structs.replace(Hello(rank=rank, world=3, epoch=7, fingerprint="same"), **changed)


@pytest.fixture
def leader() -> Leader[Any, Up]:
    return Leader("127.0.0.1", 0, world=3, epoch=7, fingerprint="same", up=Up)


def follower(leader: Leader[Any, Up], said: Hello) -> Follower[Down]:
    return Follower("127.0.0.1", leader.port, said, down=Down, timeout_seconds=5)


def gathered(leader: Leader[Any, Up], *said: Hello) -> tuple[list[Follower[Down]], list[str]]:
    """Those who were welcomed, and what the others were told. The last of them comes after the refusals: all wait for it."""
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(leader.gather, 5, 4321)
        coming = [pool.submit(follower, leader, one) for one in said[:-1]]
        refused = [next(as_completed(coming)) for _ in range(len(said) - leader.world + 1)]
        coming.append(pool.submit(follower, leader, said[-1]))
        gathering.result()
        refusals = [str(one.exception()) for one in refused]
        found = [one.result() for one in coming if one not in refused]
    for one in found:
        one.start(lambda reason: None)
    return found, refusals


@pytest.mark.parametrize(("wrong", "words"), [
    (hello(epoch=6), "rank 1 is of epoch 6, this replica of 7"),
    (hello(rank=3), "rank 3 of 3; this replica has 3"),
    (hello(rank=0), "rank 0 of 3"),
    (hello(world=2), "rank 1 of 2; this replica has 3"),
    (hello(fingerprint="other"), "serves another model, or is cut or configured otherwise"),
    (hello(rank=2), "rank 2 is here already"),
])
def test_who_does_not_belong_is_refused_with_the_reason(leader: Leader[Any, Up], wrong: Hello, words: str) -> None:
    found, (refusal,) = gathered(leader, hello(2), wrong, hello(1))
    assert [one.welcome.store_port for one in found] == [4321, 4321]
    assert words in refusal
    leader.close()


def test_a_stranger_does_no_harm(leader: Leader[Any, Up]) -> None:
    with socket.create_connection(("127.0.0.1", leader.port)) as stranger:
        stranger.sendall(b"\x05\0\0\0hello")
        assert len(gathered(leader, hello(1), hello(2))[0]) == 2
    leader.close()


@pytest.mark.parametrize(("ours", "theirs", "says"), [
    ("the token of a deployment", "", "has another security.token_file, or none"),
    ("the token of a deployment", "another token", "has another security.token_file, or none"),
])
def test_a_rank_proves_that_it_knows_the_token(ours: str, theirs: str, says: str) -> None:
    leader: Leader[Any, Up] = Leader("127.0.0.1", 0, world=2, epoch=7, fingerprint="same", up=Up, token=ours)

    def come(token: str) -> Follower[Down]:
        return Follower("127.0.0.1", leader.port, hello(world=2), down=Down, timeout_seconds=5, token=token)

    with ThreadPoolExecutor(1) as pool:
        gathering = pool.submit(leader.gather, 5, 4321)
        with pytest.raises(GangError, match=says):
            come(theirs)
        with socket.create_connection(("127.0.0.1", leader.port)) as stranger:  # an empty proof of an odd number is none
            stranger.sendall(frame(hello(world=2, nonce=b"1")))
            assert refused(stranger)
        assert come(ours).welcome.store_port == 4321
        gathering.result(5)
    leader.close()


def test_a_false_rank_0_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as false, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(Follower[Down], "127.0.0.1", false.getsockname()[1], hello(), down=Down, timeout_seconds=5,
                             token="secret")
        sock, _ = false.accept()
        with sock:
            sock.sendall(frame(Challenge(nonce=b"1")) + frame(Welcome(store_port=1)))
            with pytest.raises(GangError, match="does not know the token"):
                coming.result(5)
            assert b"secret" not in sock.recv(4096)


@pytest.mark.parametrize("bytes_", [b"\xff\xff\xff\xff", b"\x01\0\x01\0", b"\0\0\x10\0"])
def test_a_stranger_cannot_make_rank_0_take_much(leader: Leader[Any, Up], bytes_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", leader.port)) as stranger:
        stranger.sendall(bytes_)
        assert len(gathered(leader, hello(1), hello(2))[0]) == 2
    leader.close()


def test_a_stranger_cannot_keep_rank_0_drop_by_drop(monkeypatch: pytest.MonkeyPatch, leader: Leader[Any, Up]) -> None:
    monkeypatch.setattr(link, "SILENCE_SECONDS", 0.5)
    stop = threading.Event()
    with socket.create_connection(("127.0.0.1", leader.port)) as stranger:
        stranger.sendall(b"\0\xff\0\0")

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.1):
                    stranger.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert len(gathered(leader, hello(1), hello(2))[0]) == 2
        stop.set()
        dripping.join()
    leader.close()


def frame(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def refused(stranger: socket.socket) -> bool:
    said = b""
    while part := stranger.recv(4096):
        said += part
    return b"security.token_file" in said and b"\x10\xe1" not in said  # 4321, the store's port


def test_the_rendezvous_of_the_ranks_is_bound_to_its_address_alone() -> None:
    store = ranks._store("127.0.0.1")
    sockets = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = [fields[1] for fields in sockets if fields[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_missing_ranks_are_named(leader: Leader[Any, Up]) -> None:
    threading.Thread(target=lambda: follower(leader, hello(2)), daemon=True).start()
    with pytest.raises(GangError, match=r"ranks \[1\] of 3 did not come within 1 s"):
        leader.gather(1, 0)
    leader.close()


def test_all_ranks_read_what_several_threads_write_in_one_order(leader: Leader[Any, Up]) -> None:
    (one, other), _ = gathered(leader, hello(1), hello(2))
    heard: queue.Queue[tuple[int, Up]] = queue.Queue()
    leader.start(lambda rank, entry: heard.put((rank, entry)), lambda reason: None)

    def write(number: int) -> None:
        for index in range(50):
            leader.append(CopyBlock(source=number, target=index) if index % 2 else CopyState(source=number, target=index))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    read = [one.read() for _ in range(200)]
    assert [other.read() for _ in range(200)] == read
    for number in range(4):
        assert [entry.target for entry in read if entry.source == number] == list(range(50))  # type: ignore[union-attr]
    other.say(Serving(address="here"))
    other.say(LoadEnded(number=3, code="coverage", message="torn"))
    assert [heard.get(timeout=5) for _ in range(2)] == [
        (2, Serving(address="here")), (2, LoadEnded(number=3, code="coverage", message="torn"))]
    leader.close()


@pytest.mark.parametrize("end", [lambda one: one.close(), lambda one: one._closed.set()], ids=["ended", "silent"])
def test_a_rank_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch, leader: Leader[Any, Up],
                                      end: Callable[[Follower[Down]], None]) -> None:
    monkeypatch.setattr(link, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(link, "SILENCE_SECONDS", 0.5)
    found, _ = gathered(leader, hello(1), hello(2))
    first = next(iter(leader._wires))  # the other one is told although this one takes nothing
    one, gone = found if first == 2 else reversed(found)
    lost: queue.Queue[str] = queue.Queue()
    leader.start(lambda rank, entry: None, lost.put)
    with pytest.raises(queue.Empty):
        lost.get(timeout=1.2)  # beats are enough
    end(gone)
    assert lost.get(timeout=5).startswith(f"rank {first} is lost: ")
    assert lost.empty()
    leader.close()
    assert one.read() == End()


def test_a_rank_that_leaves_before_all_have_come_may_come_again(leader: Leader[Any, Up]) -> None:
    with ThreadPoolExecutor() as pool:
        gathering = pool.submit(leader.gather, 5, 4321)
        with socket.create_connection(("127.0.0.1", leader.port)) as first:
            said = msgspec.msgpack.encode(hello(1))
            first.sendall(len(said).to_bytes(4, "little") + said)
            while not leader._wires:
                time.sleep(0.01)
        coming = [pool.submit(follower, leader, hello(rank)) for rank in (1, 2)]
        gathering.result()
        assert [one.result().welcome.store_port for one in coming] == [4321, 4321]
    leader.close()


@pytest.mark.parametrize("silent", [False, True], ids=["ended", "silent"])
def test_a_rank_hears_of_a_lost_rank_0_whatever_it_does(monkeypatch: pytest.MonkeyPatch, leader: Leader[Any, Up], silent: bool
                                                        ) -> None:
    """It loads its weights, or waits in a step, and reads nothing."""
    monkeypatch.setattr(link, "SILENCE_SECONDS", 0.5)
    lost: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor() as pool:
        coming = [pool.submit(follower, leader, hello(rank)) for rank in (1, 2)]
        leader.gather(5, 0)
        found = [one.result() for one in coming]
    for one in found:
        one.start(lost.put)
    if not silent:
        for wire in leader._wires.values():
            wire.close()
    assert [lost.get(timeout=3).partition(":")[0] for _ in found] == ["rank 0 is lost"] * 2
    for one in found:
        with pytest.raises(GangError, match="rank 0 is lost"):
            one.read()


def test_an_end_in_order_is_no_loss(leader: Leader[Any, Up]) -> None:
    lost: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor() as pool:
        coming = [pool.submit(follower, leader, hello(rank)) for rank in (1, 2)]
        leader.gather(5, 0)
        found = [one.result() for one in coming]
    for one in found:
        one.start(lost.put)
    leader.start(lambda rank, entry: None, lost.put)
    leader.close()
    assert [one.read() for one in found] == [End(), End()]
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.2)
