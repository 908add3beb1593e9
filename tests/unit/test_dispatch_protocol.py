"""The state machine against replicas that fail, are busy or break the protocol, in any order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch import Action, CancelLeg, Dispatch, End, LegStats, RetryDecode, Submit, Tokens
from slipstream.errors import BusyError, CancelledError, InternalError, ProtocolError, UnavailableError
from slipstream.types import FinishReason, Role

P, D = Role.PREFILL, Role.DECODE
STATS = LegStats()


def started() -> Dispatch:
    dispatch = Dispatch()
    dispatch.start()
    return dispatch


def test_an_output_far_beyond_is_a_gap_found_at_once() -> None:
    """The check does not walk, nor remember, the four thousand million outputs in between."""
    dispatch = started()
    dispatch.tokens(P, 0, [(0, 5)])
    dispatch.tokens(D, 0, [(1, 6), (2**32 - 1, 7)])
    (*_, end) = dispatch.finished(D, 0, FinishReason.STOP, STATS)
    assert isinstance(end, End)
    assert isinstance(end.error, ProtocolError)


def test_decode_cannot_hand_over() -> None:
    """Nor end for a reason of a later version: waiting for more would be waiting for ever."""
    dispatch = started()
    dispatch.tokens(P, 0, [(0, 5)])
    actions = dispatch.finished(D, 0, None, STATS)
    assert CancelLeg(role=P, attempt=0) in actions
    assert isinstance(actions[-1], End)
    assert isinstance(actions[-1].error, ProtocolError)


def test_giving_up_before_the_start_tells_nobody() -> None:
    error = UnavailableError("nobody there")
    assert Dispatch().give_up(error) == [End(error=error)]


def test_giving_up_between_two_attempts_tells_prefill_only() -> None:
    dispatch = started()
    (retry,) = dispatch.failed(D, 0, BusyError("full"))
    assert isinstance(retry, RetryDecode)
    error = CancelledError("gone")
    assert dispatch.give_up(error) == [CancelLeg(role=P, attempt=0), End(error=error)]
    assert dispatch.retry() == [], "the timer of a retry may still fire"


@given(st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_there_is_one_end(count: int, chance: random.Random) -> None:
    """Also when legs fail, are busy, stop short or speak after they ended: tokens in order, one End, the last action; every
    leg that ran and said no end of its own is cancelled unless the request ended well."""
    dispatch = Dispatch()
    actions: list[Action] = list(dispatch.start())
    running = {(action.role, action.attempt) for action in actions if isinstance(action, Submit)}
    ended: set[tuple[Role, int]] = set()
    for _ in range(60):
        role, attempt = chance.choice(sorted(running, key=str))
        match chance.randrange(7):
            case 0 | 1 | 2:
                index = 0 if role is P else chance.randint(1, count)
                new = dispatch.tokens(role, attempt, [(index, 100 + index)])
            case 3:
                new = dispatch.finished(role, attempt, chance.choice([None, FinishReason.STOP]), STATS)
                ended.add((role, attempt))
            case 4:
                new = dispatch.failed(role, attempt, chance.choice([BusyError("full"), InternalError("broken")]))
                ended.add((role, attempt))
            case 5:
                new = dispatch.retry()
            case _:
                new = dispatch.give_up(CancelledError("gone")) if chance.random() < 0.1 else []
        running |= {(action.role, action.attempt) for action in new if isinstance(action, Submit)}
        actions += new
    actions += dispatch.give_up(CancelledError("gone"))
    shown = [token for action in actions if isinstance(action, Tokens) for token in action.tokens]
    assert shown == [100 + index for index in range(len(shown))]
    ends = [action for action in actions if isinstance(action, End)]
    assert len(ends) == 1
    assert actions[-1] is ends[0]
    if ends[0].error is not None:
        cancels = {(action.role, action.attempt) for action in actions if isinstance(action, CancelLeg)}
        attempts = [attempt for role, attempt in running if role is D]
        for key in ((P, 0), (D, max(attempts))):
            assert key in cancels | ended, "a leg goes on that nobody waits for"
