"""What `slipstream transfers` makes of what replicas tell: two ends are one stream, all streams of a transfer one line."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_transfer.coverage import Coverage
from cache_transfer.layout import whole
from cache_transfer.record import EVENTS, RECEIVE, SEND, StreamRecord
from cache_transfer.transfers import Transfers
from launch.transfers import PHASES, joined, problems, show
from tests.support import transfer_rig
from worker.transfers import RankTransfers


def end(side: str, ranks: tuple[int, int], *, kv: int, total: int | None, phase: str = "moving", age: float = 2.0,
        transfer: str = "t", attempt: int = 0) -> dict[str, Any]:
    """As a replica tells it; `ranks`: of prefill, of decode."""
    own, other = ranks if side == SEND else ranks[::-1]
    return {"request_id": f"req-{transfer}", "transfer_id": transfer, "attempt": attempt, "side": side, "rank": own,
            "peer": "decode-0" if side == SEND else "prefill-0", "peer_rank": other, "channel": "grpc", "phase": phase,
            "age_seconds": age, "kv_bytes": kv, "state_bytes": 1, "total_bytes": total}


def replicas(*ends: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"replica_id": name, "transfers": [one for one in ends if one["side"] == side]}
            for name, side in (("prefill-0", SEND), ("decode-0", RECEIVE))]


def test_what_has_landed_counts_and_every_rank_adds_its_part() -> None:
    told = replicas(end(SEND, (0, 0), kv=90, total=100), end(RECEIVE, (0, 0), kv=70, total=100, age=3.0),
                    end(SEND, (1, 0), kv=9, total=100, phase="ready"), end(SEND, (0, 0), kv=0, total=None, transfer="u", age=9))
    old, new = joined(told)
    assert (old["request_id"], old["bytes"], old["total_bytes"]) == ("req-u", 1, None)
    assert (new["prefill"], new["decode"], new["bytes"], new["total_bytes"]) == ("prefill-0", "decode-0", 71 + 10, 200)
    assert (new["phase"], new["age_seconds"], len(new["streams"])) == ("ready", 3.0, 2)


@given(st.lists(st.sampled_from(PHASES), min_size=1, max_size=6))
def test_the_phase_is_that_of_the_slowest_unless_memory_is_kept(phases: list[str]) -> None:
    (one,) = joined(replicas(*(end(RECEIVE, (rank, 0), kv=0, total=9, phase=phase) for rank, phase in enumerate(phases))))
    assert one["phase"] == ("quarantined" if "quarantined" in phases else min(phases, key=PHASES.index))


@pytest.mark.parametrize(("source", "phase"), [("ready", "ready"), ("moving", "sending"), ("moved", "sending")])
def test_a_destination_that_waits_for_the_link_is_told_from_one_that_waits_for_the_first_layer(source: str, phase: str) -> None:
    ends = end(SEND, (0, 0), kv=0, total=9, phase=source), end(RECEIVE, (0, 0), kv=0, total=9, phase="ready")
    assert [one["phase"] for told in (ends, ends[::-1]) for one in joined(replicas(*told))] == [phase, phase]


@pytest.mark.parametrize("columns", ["", "80", "120"])
def test_neither_request_ids_nor_the_phase_are_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                                   columns: str) -> None:
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    name, one = "r" * 160, end(RECEIVE, (0, 0), kv=0, total=9, phase="quarantined")
    show({"replicas": replicas({**one, "request_id": name})}, as_json=False)
    shown = capsys.readouterr().out
    assert name in shown
    assert "quarantined" in shown
    assert columns or len(shown.splitlines()) == 2


def test_an_attempt_that_ends_is_not_mixed_with_the_next() -> None:
    assert len(joined(replicas(end(SEND, (0, 0), kv=5, total=9), end(RECEIVE, (0, 0), kv=0, total=9, attempt=1)))) == 2


async def test_a_rank_that_does_not_answer_is_named_and_the_others_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        transfers = Transfers()
        transfers.open(SEND, request_id="r", transfer_id="t", attempt=0, rank=0, peer="decode-0", peer_rank=0, now=0.0)
        reply = await RankTransfers(transfers).of_all([f"127.0.0.1:{silent.getsockname()[1]}"])
    assert [one.request_id for one in reply.transfers] == ["r"]
    assert [text.startswith("rank 1 does not tell its transfers: ") for text in reply.silent_ranks] == [True]


def test_who_does_not_tell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = [*replicas(end(SEND, (0, 0), kv=2047, total=1 << 20)), {"replica_id": "decode-1", "inspect_problem": "no answer"},
            {"replica_id": "", "address": "x:1", "problem": "UNAVAILABLE"}]
    told[0]["silent_ranks"] = ["rank 1 is silent"]
    wanted = ["prefill-0: rank 1 is silent", "decode-1: no answer", "x:1: UNAVAILABLE"]
    assert problems(told) == wanted
    show({"replicas": told}, as_json=False)
    shown = capsys.readouterr().out.splitlines()
    assert re.split(" {2,}", shown[1]) == ["req-t", "prefill-0 -> decode-0", "grpc", "1", "moving", "2.0 KiB of 1.0 MiB",
                                           "2.0 s"]
    assert shown[2:] == wanted
    show({"replicas": told}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"transfers": joined(told), "problems": wanted}


def record(ended: list[StreamRecord]) -> StreamRecord:
    return StreamRecord(side=SEND, request_id="r", transfer_id="t", attempt=0, rank=0, peer="d", peer_rank=0, opened=10.0,
                        on_end=ended.append, on_quarantine=ended.append)


@given(st.lists(st.none() | st.floats(0, 5), min_size=4, max_size=4))
def test_the_steps_of_a_stream_are_its_whole_time(gaps: list[float | None]) -> None:
    """Whichever events it skipped; and it ends once."""
    ended: list[StreamRecord] = []
    one, now = record(ended), 10.0
    for event, gap in zip(list(EVENTS)[:4], gaps, strict=True):
        if gap is not None:
            now += gap
            setattr(one, event, now)
    one.end(now + 1, "committed")
    one.end(now + 9, "lost")
    assert (ended, one.outcome, one.ended) == ([one], "committed", now + 1)
    assert sum(one.steps().values()) == pytest.approx(now + 1 - 10)
    assert all(seconds >= 0 for seconds in one.steps().values())


def test_a_phase_is_what_happened_last() -> None:
    def seen() -> Iterator[str]:
        one = record([])
        yield one.phase
        for event in (*list(EVENTS)[:4], "quarantined"):
            setattr(one, event, 11.0)
            yield one.phase

    assert tuple(seen()) == tuple(phase for phase in PHASES if phase != "sending"), "that takes both ends to know"


@pytest.mark.parametrize(("tokens", "have"), [(1, 0), (17, 0), (17, 16), (40, 8)])
def test_the_total_is_what_is_necessary(tokens: int, have: int) -> None:
    layout = transfer_rig.layout()
    (kv, state), (reused, _) = layout.bytes_necessary(tokens), layout.bytes_necessary(have)
    one = record([])
    assert (one.kv_bytes, one.state_bytes, one.total_bytes) == (0, 0, None)
    one.coverage = Coverage(transfer_rig.destination(layout, whole(layout))[0], tokens, have)
    assert one.total_bytes == kv - reused + state
