"""One request's state machine under every order of events, and the text stream over any cut."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch import Action, CancelLeg, Dispatch, End, LegStats, RetryDecode, Submit, Tokens
from router.limits import Limits
from router.policy import Replica, another_decode, choose, missing
from router.stream import StopFilter
from slipstream.errors import (
    BusyError,
    CancelledError,
    LeaseExpiredError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from slipstream.types import FinishReason, Role

P, D = Role.PREFILL, Role.DECODE
STATS = LegStats()


def shown(actions: Sequence[Action]) -> list[int]:
    return [token for action in actions if isinstance(action, Tokens) for token in action.tokens]


def ends(actions: Sequence[Action]) -> list[End]:
    return [action for action in actions if isinstance(action, End)]


def cancels(actions: Sequence[Action]) -> set[Role]:
    return {action.role for action in actions if isinstance(action, CancelLeg)}


def started() -> Dispatch:
    dispatch = Dispatch()
    assert dispatch.start() == [Submit(role=P, attempt=0), Submit(role=D, attempt=0)]
    return dispatch


@given(st.integers(2, 12), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_any_order_and_doubling_gives_each_token_once(count: int, chance: random.Random) -> None:
    """The two legs are two streams: each keeps its order, they mix freely; tokens may repeat and swap inside a leg."""
    rows = [index for index in range(1, count) for _ in range(chance.randint(1, 2))]
    chance.shuffle(rows)
    legs: dict[Role, list[tuple[int, ...]]] = {P: [(0,), (0,), ()], D: [*((row,) for row in rows), ()]}
    dispatch, actions = started(), list[Action]()
    while any(legs.values()):
        role = chance.choice([role for role in Role if legs[role]])
        event = legs[role].pop(0)
        if event:
            actions += dispatch.tokens(role, 0, [(index, 100 + index) for index in event])
        else:
            actions += dispatch.finished(role, 0, FinishReason.LENGTH if role is D else None, STATS)
    assert shown(actions) == [100 + index for index in range(count)]
    assert ends(actions) == [End(reason=FinishReason.LENGTH)]
    assert isinstance(actions[-1], End)


@pytest.mark.parametrize("decode_first", [False, True])
def test_first_token_that_ends(decode_first: bool) -> None:
    dispatch, actions = started(), list[Action]()
    if decode_first:
        actions += dispatch.finished(D, 0, FinishReason.STOP, STATS)
        assert not actions
    actions += dispatch.tokens(P, 0, [(0, 7)])
    actions += dispatch.finished(P, 0, FinishReason.STOP, STATS)
    assert shown(actions) == [7]
    assert ends(actions) == [End(reason=FinishReason.STOP)]


def test_busy_keeps_the_prefill_leg() -> None:
    dispatch = started()
    waits = []
    for attempt in range(9):
        (retry,) = dispatch.failed(D, attempt, BusyError("full"))
        assert isinstance(retry, RetryDecode)
        waits.append(retry.seconds)
        assert dispatch.retry() == [Submit(role=D, attempt=attempt + 1)]
        assert not dispatch.tokens(D, attempt, [(1, 5)]), "an attempt that is over says nothing more"
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5, 0.5]
    (retry,) = dispatch.failed(D, 9, BusyError("full"), jitter=0.5)
    assert retry == RetryDecode(seconds=0.25)


def test_a_leg_that_fails_takes_the_other_with_it() -> None:
    for role, other in ((P, D), (D, P)):
        error = LeaseExpiredError("over")
        actions = started().failed(role, 0, error)
        assert other in cancels(actions)
        assert ends(actions) == [End(error=error)]


def test_busy_prefill_ends_the_request() -> None:
    assert len(ends(started().failed(P, 0, BusyError("full")))) == 1


def test_nothing_follows_an_end() -> None:
    dispatch = started()
    assert cancels(dispatch.give_up(CancelledError("gone"))) == {P, D}
    late = [
        dispatch.tokens(P, 0, [(0, 1)]),
        dispatch.finished(D, 0, FinishReason.STOP, STATS),
        dispatch.failed(P, 0, BusyError("x")),
        dispatch.retry(),
        dispatch.give_up(CancelledError("again")),
        dispatch.enough(FinishReason.STOP),
    ]
    assert late == [[]] * 6


@pytest.mark.parametrize("rows", [[2, 3], [1, 3], [3]])
def test_a_leg_that_ends_with_a_gap_broke_the_protocol(rows: list[int]) -> None:
    dispatch = started()
    dispatch.tokens(D, 0, [(index, index) for index in rows])
    (end,) = ends(dispatch.finished(D, 0, FinishReason.STOP, STATS))
    assert isinstance(end.error, ProtocolError)
    assert end.reason is None


def test_prefill_that_ends_without_a_token_broke_the_protocol() -> None:
    (end,) = ends(started().finished(P, 0, None, STATS))
    assert isinstance(end.error, ProtocolError)


# Pairs and limits ------------------------------------------------------------------------------------------------------


def replica(name: str, role: Role, compatibility_hash: str = "a", **more: int | bool) -> Replica:
    return Replica(id=name, role=role, compatibility_hash=compatibility_hash, **more)  # type: ignore[arg-type]


def test_what_is_missing_is_named() -> None:
    assert "prefill" in missing([])
    assert "decode" in missing([])
    assert "decode" in missing([replica("p", P), replica("d", D, draining=True)])
    assert "hash" in missing([replica("p", P, "a"), replica("d", D, "b")])
    assert missing([replica("p", P), replica("d", D)]) == ""
    with pytest.raises(UnavailableError, match="decode") as caught:
        choose([replica("p", P)], turn=0)
    assert caught.value.retry_after_seconds


def test_a_pair_fits_together_and_is_the_least_loaded() -> None:
    replicas = [
        replica("p0", P, "a", in_flight=0),
        replica("p1", P, "b", in_flight=5),
        replica("p2", P, "b", in_flight=3),
        replica("d0", D, "b", waiting=4),
        replica("d1", D, "b", running=2),
        replica("d2", D, "c"),
    ]
    for turn in range(5):
        pair = choose(replicas, turn=turn)
        assert (pair.prefill.id, pair.decode.id) == ("p2", "d1")


def test_equals_take_turns() -> None:
    replicas = [replica(f"{role.value}{number}", role) for role in Role for number in range(3)]
    assert len({choose(replicas, turn=turn).prefill.id for turn in range(3)}) == 3
    assert len({choose(replicas, turn=turn).decode.id for turn in range(3)}) == 3


def test_another_decode_is_another_if_there_is_one() -> None:
    replicas = [replica("d0", D), replica("d1", D, in_flight=9), replica("d2", D, "b")]
    assert another_decode(replicas, "a", not_now={"d0"}, turn=0).id == "d1"
    assert another_decode(replicas, "a", not_now={"d0", "d1"}, turn=0).id == "d0"
    with pytest.raises(UnavailableError):
        another_decode(replicas, "c", not_now=set(), turn=0)


def test_limits() -> None:
    limits = Limits(2)
    limits.admit()
    limits.admit()
    with pytest.raises(OverloadedError) as caught:
        limits.admit()
    assert caught.value.retry_after_seconds
    limits.leave()
    limits.admit()


# Stop strings ----------------------------------------------------------------------------------------------------------


@given(st.text("ab ", max_size=30), st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_stop_strings_over_any_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    # Pieces come one after another: the stop whose end is first in the text is the one that stops it.
    first_end = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    one_by_one = StopFilter(stops)
    seen = ""
    for letter in text:
        seen += one_by_one.add(letter)
        assert not any(stop in seen for stop in stops), "no part of a stop string is ever shown"
    seen += one_by_one.finish()
    if first_end is None:
        assert seen == text
    else:
        assert one_by_one.stopped
        assert seen == min((text[: text.find(stop)] for stop in stops if stop in text[:first_end]), key=len)
    cut = data.draw(st.integers(0, len(text)))
    whole = StopFilter(stops)
    joined = whole.add(text[:cut]) + whole.add(text[cut:]) + whole.finish()
    assert joined == text if not found else text.startswith(joined)
