"""One request's state machine: runs, busy replicas, resume, several choices, under every order of events."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch import (
    Action,
    CancelLeg,
    ChoiceEnd,
    Dispatch,
    End,
    LegStats,
    Resume,
    RetryDecode,
    Row,
    Submit,
    Tokens,
)
from slipstream.errors import (
    BusyError,
    CancelledError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    LeaseExpiredError,
    PreemptedError,
    ProtocolError,
    RequestTooLargeError,
    SlipstreamError,
    TransferError,
    UnavailableError,
)
from slipstream.types import FinishReason, Role

P, D = Role.PREFILL, Role.DECODE
STATS = LegStats()
STOP = FinishReason.STOP


def row(index: int, choice: int = 0, last: bool = False) -> Row:
    return Row(choice=choice, index=index, token=100 * choice + index, finish=STOP if last else None)


def shown(actions: Sequence[Action], choice: int = 0) -> list[int]:
    return [token for action in actions if isinstance(action, Tokens) and action.choice == choice for token in action.tokens]


def ends(actions: Sequence[Action]) -> list[End]:
    return [action for action in actions if isinstance(action, End)]


def cancels(actions: Sequence[Action]) -> set[tuple[int, Role, int]]:
    return {(action.run, action.role, action.attempt) for action in actions if isinstance(action, CancelLeg)}


def resumes(actions: Sequence[Action]) -> list[Resume]:
    return [action for action in actions if isinstance(action, Resume)]


def started(choices: int = 1, max_resumes: int = 3) -> Dispatch:
    dispatch = Dispatch(range(choices), max_resumes)
    assert dispatch.start() == [Submit(run=0, role=role, choices=tuple(range(choices))) for role in (P, D)]
    return dispatch


# One run ---------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 12), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_any_order_and_doubling_gives_each_token_once(count: int, chance: random.Random) -> None:
    """The two legs are two streams: each keeps its order, they mix freely; tokens may repeat and swap inside a leg."""
    indices = [index for index in range(1, count) for _ in range(chance.randint(1, 2))]
    chance.shuffle(indices)
    legs: dict[Role, list[list[Row]]] = {P: [[row(0)], [row(0)], []],
                                         D: [*([row(index, last=index == count - 1)] for index in indices), []]}
    dispatch, actions = started(), list[Action]()
    while any(legs.values()):
        role = chance.choice([role for role in Role if legs[role]])
        event = legs[role].pop(0)
        actions += dispatch.tokens(0, role, 0, event) if event else dispatch.finished(0, role, 0, STATS, handed_off=role is P)
    assert shown(actions) == list(range(count))
    assert [action for action in actions if not isinstance(action, Tokens)] == [ChoiceEnd(choice=0, reason=STOP), End()]


@pytest.mark.parametrize("decode_first", [False, True])
def test_first_token_that_ends(decode_first: bool) -> None:
    dispatch, actions = started(), list[Action]()
    if decode_first:
        actions += dispatch.finished(0, D, 0, STATS)
        assert not actions
    actions += dispatch.tokens(0, P, 0, [row(0, last=True)])
    actions += dispatch.finished(0, P, 0, STATS)
    assert shown(actions) == [0]
    assert actions[-2:] == [ChoiceEnd(choice=0, reason=STOP), End()]


def test_the_end_waits_for_what_the_leg_says_of_itself() -> None:
    dispatch = started()
    dispatch.tokens(0, P, 0, [row(0)])
    dispatch.finished(0, P, 0, LegStats(cached_tokens=4), handed_off=True)
    assert not ends(dispatch.tokens(0, D, 0, [row(1, last=True)]))
    assert ends(dispatch.finished(0, D, 0, LegStats(kv_bytes=7))) == [End()]
    assert (dispatch.stats[P].cached_tokens, dispatch.stats[D].kv_bytes) == (4, 7)


def test_what_prefill_did_is_known_although_the_end_comes_before_its_own() -> None:
    dispatch, did = started(), LegStats(compute_seconds=0.5, cached_tokens=4)
    dispatch.computed(0, P, 1, did)
    assert not dispatch.stats, "of no attempt"
    dispatch.computed(0, P, 0, did)
    dispatch.tokens(0, P, 0, [row(0)])
    dispatch.tokens(0, D, 0, [row(1, last=True)])
    assert ends(dispatch.finished(0, D, 0, STATS)) == [End()]
    assert dispatch.stats[P] == did


@pytest.mark.parametrize("told", [True, False])
def test_what_prefill_did_counts_once_a_run(told: bool) -> None:
    """What was cached only the first run can say: the next one finds what that one computed."""
    dispatch, did = started(), LegStats(compute_seconds=0.5, cached_tokens=4)
    if told:
        dispatch.computed(0, P, 0, did)
        dispatch.finished(0, P, 0, did, handed_off=True)
    dispatch.failed(0, D, 0, UnavailableError("lost"))
    dispatch.begin(1)
    dispatch.finished(1, P, 0, LegStats(compute_seconds=0.25, cached_tokens=9), handed_off=True)
    assert dispatch.stats[P] == LegStats(compute_seconds=0.75 if told else 0.25, cached_tokens=4 if told else 0)


def test_all_tokens_and_then_a_lost_worker_is_a_good_end() -> None:
    dispatch = started()
    dispatch.tokens(0, P, 0, [row(0)])
    dispatch.tokens(0, D, 0, [row(1, last=True)])
    assert ends(dispatch.failed(0, D, 0, UnavailableError("lost"))) == [End()]


def test_a_leg_reports_its_own_tokens_only() -> None:
    dispatch = started()
    assert dispatch.tokens(0, D, 0, [row(0), row(1, choice=5)]) == []
    assert dispatch.tokens(0, P, 0, [row(1)]) == []
    assert shown(dispatch.tokens(0, P, 0, [row(0)])) == [0]


# Busy ------------------------------------------------------------------------------------------------------------------


def test_busy_keeps_the_prefill_leg() -> None:
    dispatch = started()
    waits = []
    for attempt in range(9):
        (retry,) = dispatch.failed(0, D, attempt, BusyError("full"))
        assert isinstance(retry, RetryDecode)
        waits.append(retry.seconds)
        assert dispatch.retry(0) == [Submit(run=0, role=D, attempt=attempt + 1, choices=(0,))]
        assert not dispatch.tokens(0, D, attempt, [row(1)]), "an attempt that is over says nothing more"
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5, 0.5]
    (retry,) = dispatch.failed(0, D, 9, BusyError("full"), jitter=0.5)
    assert retry == RetryDecode(run=0, seconds=0.25)


def test_giving_up_between_two_attempts_tells_prefill_only() -> None:
    dispatch = started()
    dispatch.failed(0, D, 0, BusyError("full"))
    error = CancelledError("gone")
    assert dispatch.give_up(error) == [CancelLeg(run=0, role=P, attempt=0), End(error=error)]
    assert dispatch.retry(0) == [], "the timer of a retry may still fire"


# Resume ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [UnavailableError("lost"), TransferError("broken"), LeaseExpiredError("over"),
                                   InternalError("fault"), BusyError("prefill has no room")])
def test_a_failure_gives_the_run_up_and_goes_on_from_the_tokens_so_far(error: SlipstreamError) -> None:
    dispatch = started()
    dispatch.tokens(0, P, 0, [row(0)])
    dispatch.tokens(0, D, 0, [row(1), row(2), row(4)])
    failing = P if isinstance(error, BusyError) else D
    actions = dispatch.failed(0, failing, 0, error)
    assert (0, P, 0) in cancels(actions)
    (resume,) = resumes(actions)
    assert (resume.run, resume.error) == (1, error)
    assert not dispatch.tokens(0, D, 0, [row(3)]), "the old run says nothing more"
    assert dispatch.begin(1) == [Submit(run=1, role=role, choices=(0,), output=(0, 1, 2)) for role in (P, D)]
    assert shown(dispatch.tokens(1, P, 0, [row(3)])) == [3]
    assert shown(dispatch.tokens(1, D, 0, [row(4, last=True)])) == [4]
    assert ends(dispatch.finished(1, D, 0, STATS)) == [End()]
    assert dispatch.resumes == 1


@pytest.mark.parametrize("error", [InvalidRequestError("no"), RequestTooLargeError("no"), DeadlineError("late"),
                                   CancelledError("gone")])
def test_what_would_fail_again_ends_the_request(error: SlipstreamError) -> None:
    for role, other in ((P, D), (D, P)):
        actions = started().failed(0, role, 0, error)
        assert (0, other, 0) in cancels(actions)
        assert ends(actions) == [End(error=error)]


def test_resumes_are_bounded_by_failures_and_preemptions_do_not_count() -> None:
    dispatch, run = started(max_resumes=2), 0
    errors = [PreemptedError("memory"), UnavailableError("one"), PreemptedError("memory"), UnavailableError("two"),
              PreemptedError("memory")]
    for error in errors:
        (resume,) = resumes(dispatch.failed(run, D, 0, error))
        run = resume.run
        dispatch.begin(run)
    last = TransferError("three")
    assert ends(dispatch.failed(run, P, 0, last)) == [End(error=last)]


def test_pauses_grow() -> None:
    dispatch, run, pauses = started(max_resumes=9), 0, []
    for _ in range(7):
        (resume,) = resumes(dispatch.failed(run, D, 0, UnavailableError("lost")))
        run = resume.run
        pauses.append(resume.seconds)
        dispatch.begin(run)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]


@pytest.mark.parametrize("indices", [[2, 3], [1, 3], [3], [1, 2**32 - 1]])
def test_a_leg_that_ends_with_a_gap_broke_the_protocol(indices: list[int]) -> None:
    """The check does not walk, nor remember, the outputs in between."""
    dispatch = started()
    dispatch.tokens(0, P, 0, [row(0)])
    dispatch.tokens(0, D, 0, [row(index, last=index == indices[-1]) for index in indices])
    (resume,) = resumes(dispatch.finished(0, D, 0, STATS))
    assert isinstance(resume.error, ProtocolError)


def test_prefill_that_ends_without_a_token_broke_the_protocol() -> None:
    (resume,) = resumes(started().finished(0, P, 0, STATS, handed_off=True))
    assert isinstance(resume.error, ProtocolError)


def test_a_picture_that_did_not_arrive_breaks_the_run() -> None:
    dispatch = started()
    actions = dispatch.broken(0, UnavailableError("no room for pictures"))
    assert cancels(actions) == {(0, P, 0), (0, D, 0)}
    assert len(resumes(actions)) == 1
    assert dispatch.broken(0, UnavailableError("the second picture")) == []


def test_a_run_that_breaks_when_all_its_tokens_are_there_is_a_good_end() -> None:
    dispatch = started()
    dispatch.tokens(0, P, 0, [row(0)])
    dispatch.finished(0, P, 0, STATS, handed_off=True)
    assert not ends(dispatch.tokens(0, D, 0, [row(1, last=True)]))
    actions = dispatch.broken(0, UnavailableError("a picture came too late"))
    assert (cancels(actions), ends(actions)) == ({(0, P, 0), (0, D, 0)}, [End()])


def test_nothing_follows_an_end() -> None:
    dispatch = started()
    assert cancels(dispatch.give_up(CancelledError("gone"))) == {(0, P, 0), (0, D, 0)}
    late = [dispatch.tokens(0, P, 0, [row(0)]), dispatch.finished(0, D, 0, STATS), dispatch.failed(0, P, 0, BusyError("x")),
            dispatch.retry(0), dispatch.begin(1), dispatch.give_up(CancelledError("again")), dispatch.enough(0),
            dispatch.broken(0, UnavailableError("x"))]
    assert late == [[]] * 8


def test_giving_up_before_the_start_tells_nobody() -> None:
    error = UnavailableError("nobody there")
    assert Dispatch().give_up(error) == [End(error=error)]


# Several choices -------------------------------------------------------------------------------------------------------


def test_choices_that_have_tokens_part_at_a_resume_and_the_others_stay_together() -> None:
    dispatch = started(4)
    dispatch.tokens(0, P, 0, [row(0, 0), row(0, 1, last=True)])
    dispatch.tokens(0, D, 0, [row(1, 0)])
    actions = dispatch.failed(0, D, 0, UnavailableError("lost"))
    assert [(resume.run, resume.seconds) for resume in resumes(actions)] == [(1, 0.02), (2, 0.02)]
    assert dispatch.begin(1)[0] == Submit(run=1, role=P, choices=(0,), output=(0, 1))
    assert dispatch.begin(2)[0] == Submit(run=2, role=P, choices=(2, 3))


def test_a_stop_string_ends_its_choice_and_the_last_one_the_request() -> None:
    dispatch = started(2)
    dispatch.tokens(0, P, 0, [row(0, 0), row(0, 1)])
    assert dispatch.enough(0) == [ChoiceEnd(choice=0, reason=STOP)]
    assert shown(dispatch.tokens(0, D, 0, [row(1, 0), row(1, 1)]), 0) == []
    actions = dispatch.enough(1)
    assert cancels(actions) == {(0, P, 0), (0, D, 0)}
    assert actions[-1] == End()


def test_a_choice_that_is_over_is_not_resumed() -> None:
    dispatch = started(2)
    dispatch.tokens(0, P, 0, [row(0, 0), row(0, 1)])
    dispatch.enough(0)
    (resume,) = resumes(dispatch.failed(0, D, 0, UnavailableError("lost")))
    assert dispatch.begin(resume.run)[0] == Submit(run=1, role=P, choices=(1,), output=(100,))


# Whatever happens ------------------------------------------------------------------------------------------------------


class _Workers:
    """Legs that behave as they like: late, early, doubled, failing at any moment, but never with a wrong token."""

    def __init__(self, lengths: Sequence[int], chance: random.Random, faults: float, local: float) -> None:
        """`local`: share of the runs whose prompt decode computes."""
        self.lengths, self.chance, self.faults, self.local = lengths, chance, faults, local
        self.legs: dict[tuple[int, Role, int], list[list[Row]]] = {}
        self.submits: dict[tuple[int, Role, int], Submit] = {}
        self.gone: set[tuple[int, Role, int]] = set()
        self.well: set[int] = set()
        """Runs of which a leg ended as it should: that leg tells the other one, on their transfer."""
        self.todo: list[RetryDecode | Resume] = []
        self.stopped: set[int] = set()
        """Choices whose text was complete before their last token."""

    def take(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Submit):
                key = action.run, action.role, action.attempt
                assert key not in self.legs
                self.submits[key], self.legs[key] = action, self.plan(action)
            elif isinstance(action, CancelLeg):
                self.gone.add((action.run, action.role, action.attempt))
            elif isinstance(action, RetryDecode | Resume):
                self.todo.append(action)

    def plan(self, submit: Submit) -> list[list[Row]]:
        base = len(submit.output)
        rows = [row(index, choice, index == self.lengths[choice] - 1) for choice in submit.choices
                for index in range(base, self.lengths[choice]) if submit.local or (index == base) is (submit.role is P)]
        rows += self.chance.sample(rows, len(rows) // 3)
        self.chance.shuffle(rows)
        cut = self.chance.randint(1, 3)
        return [rows[start : start + cut] for start in range(0, len(rows), cut)]

    def speak(self, dispatch: Dispatch) -> list[Action]:
        """Something that one leg says, or the router: its timers, a stop string, a picture that did not arrive."""
        if self.chance.random() < self.faults / 4:
            if self.chance.random() < 0.5:
                return dispatch.broken(self.chance.choice(list(self.submits))[0], UnavailableError("no picture"))
            self.stopped.add(choice := self.chance.randrange(len(self.lengths)))
            return dispatch.enough(choice)
        speaking = [key for key in self.legs if key not in self.gone]
        if self.todo and (not speaking or self.chance.random() < 0.3):
            waited = self.todo.pop(self.chance.randrange(len(self.todo)))
            return dispatch.retry(waited.run) if isinstance(waited, RetryDecode) else dispatch.begin(
                waited.run, local=self.chance.random() < self.local)
        run, role, attempt = key = self.chance.choice(speaking)
        if self.chance.random() < self.faults:
            self.gone.add(key)
            kinds = [UnavailableError("lost"), PreemptedError("memory"), InternalError("fault")]
            kinds += [BusyError("full")] if role is D else []
            return dispatch.failed(run, role, attempt, self.chance.choice(kinds))
        if self.legs[key]:
            return dispatch.tokens(run, role, attempt, self.legs[key].pop())
        self.gone.add(key)
        self.well.add(run)
        submit = self.submits[key]
        goes_on = any(self.lengths[choice] > len(submit.output) + 1 for choice in submit.choices)
        return dispatch.finished(run, role, attempt, STATS, handed_off=role is P and goes_on)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 1 << 32), st.sampled_from([0.0, 0.1, 0.3]),
       st.sampled_from([0.0, 0.5]))
@settings(max_examples=2000, deadline=None)  # by a seed: drawing every choice from hypothesis is ten times slower
def test_every_choice_gets_its_tokens_once_and_in_order_or_the_request_fails(
        lengths: list[int], seed: int, faults: float, local: float) -> None:
    workers, dispatch = _Workers(lengths, random.Random(seed), faults, local), Dispatch(range(len(lengths)), max_resumes=3)
    actions = dispatch.start(local=workers.chance.random() < local)
    workers.take(actions)
    for _ in range(2000):
        if dispatch.over:
            break
        new = workers.speak(dispatch)
        workers.take(new)
        actions += new
    assert dispatch.over, "it always ends"
    (end,) = ends(actions)
    assert actions[-1] is end
    for choice, length in enumerate(lengths):
        right = [100 * choice + index for index in range(length)]
        got = shown(actions, choice)
        assert got == right[: len(got)]
        if end.error is None and choice not in workers.stopped:
            assert got == right
    complete = {action.choice for action in actions if isinstance(action, ChoiceEnd)}
    for key in workers.legs.keys() - workers.gone:
        assert complete.issuperset(workers.submits[key].choices), "a leg goes on that nobody waits for"
        assert key[0] in workers.well, "a leg goes on that nobody ends"
