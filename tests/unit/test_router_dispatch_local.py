"""A run that decode serves alone: one leg brings every token, fails, is retried, resumed and cancelled like two."""

from __future__ import annotations

import pytest

from router.actions import CancelLeg, End, LegStats, RetryDecode, Submit
from router.dispatch import Dispatch
from slipstream.errors import BusyError, CancelledError, ProtocolError, UnavailableError
from slipstream.types import Role
from tests.unit.test_router_dispatch import STATS, D, resumes, row, shown


def test_a_local_run_has_one_leg_that_brings_every_token() -> None:
    dispatch = Dispatch()
    assert dispatch.start(local=True) == [Submit(run=0, role=D, choices=(0,), local=True)]
    assert shown(dispatch.tokens(0, D, 0, [row(0), row(1, last=True)]), 0) == [0, 1]
    stats = LegStats(cached_tokens=16, queue_seconds=0.5)
    assert dispatch.finished(0, D, 0, stats) == [End()]
    assert dispatch.stats == {D: stats}


def test_a_local_run_may_find_its_replica_busy_or_lose_it() -> None:
    dispatch = Dispatch()
    dispatch.start(local=True)
    assert dispatch.failed(0, D, 0, BusyError("full")) == [RetryDecode(run=0, seconds=0.02)]
    assert dispatch.retry(0) == [Submit(run=0, role=D, attempt=1, choices=(0,), local=True)]
    dispatch.tokens(0, D, 1, [row(0)])
    (resume,) = resumes(dispatch.failed(0, D, 1, UnavailableError("lost")))
    both = dispatch.begin(resume.run)
    assert both == [Submit(run=resume.run, role=role, choices=(0,), output=(0,)) for role in Role]


@pytest.mark.parametrize("indices", [[], [0], [1]])
def test_a_local_leg_that_ends_before_its_last_token_broke_the_protocol(indices: list[int]) -> None:
    dispatch = Dispatch()
    dispatch.start(local=True)
    dispatch.tokens(0, D, 0, [row(index, last=index == 1) for index in indices])
    (resume,) = resumes(dispatch.finished(0, D, 0, STATS))
    assert isinstance(resume.error, ProtocolError)


def test_a_local_run_that_is_given_up_cancels_its_only_leg() -> None:
    dispatch = Dispatch()
    dispatch.start(local=True)
    assert dispatch.give_up(error := CancelledError("gone")) == [CancelLeg(run=0, role=D, attempt=0), End(error=error)]
