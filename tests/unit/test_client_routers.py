"""Which router a client asks next and when, and what it makes of errors: properties over random failures."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from slipstream_client import errors
from slipstream_client.routers import Retry, Routers

RETRIED = (errors.UnavailableError, errors.OverloadedError)
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ClientError)]


@given(st.integers(1, 5), st.integers(1, 8), st.lists(st.tuples(st.sampled_from(RETRIED), st.floats(0, 20), st.floats(0, 1))))
def test_a_call_ends_and_nobody_is_asked_before_the_time_that_it_said(count: int, attempts: int, fates: list[Any]) -> None:
    routers = Routers([f"r{i}" for i in range(count)], Retry(attempts=attempts))
    now, told, asked = 1000.0, [0.0] * count, []
    for attempt in range(1, attempts + 1):
        index, wait = routers.choose(attempt, now)
        now += wait
        assert now >= told[index] - 1e-6
        asked.append(index)
        if not fates:
            routers.well(index)
            break
        kind, seconds, chance = fates.pop(0)
        told[index] = now + seconds
        again = routers.failed(index, kind("x", retry_after_seconds=seconds), attempt, now, chance)
        assert again is (attempt < attempts)
    assert len(set(asked[:count])) == min(count, len(asked)), "every router is asked once before one is asked twice"


@given(st.sampled_from(KINDS), st.one_of(st.none(), st.floats(0, 5)))
def test_only_what_may_go_well_is_tried_again(kind: type[errors.ClientError], seconds: float | None) -> None:
    routers = Routers(["a"], Retry())
    assert routers.failed(0, kind("x", retry_after_seconds=seconds), 1, 0.0, 0.5) is issubclass(kind, RETRIED)


def test_pauses_double_up_to_a_limit_and_end_with_an_answer() -> None:
    routers = Routers(["a"], Retry(first_seconds=1.0, most_seconds=4.0))
    now, pauses = 0.0, []
    for attempt in range(1, 6):
        routers.failed(0, errors.UnavailableError("x"), attempt, now, 1.0)
        assert routers.choose(1, now) == (0, 0.0), "another call's first try does not wait"
        pauses.append(routers.choose(attempt + 1, now)[1])
        now += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    routers.well(0)
    assert routers.choose(2, now) == (0, 0.0)


def test_many_calls_that_fail_at_once_are_one_failure() -> None:
    routers = Routers(["a"], Retry(first_seconds=1.0))
    for _ in range(100):
        routers.failed(0, errors.UnavailableError("x"), 1, 10.0, 1.0)
    assert routers.choose(2, 10.0) == (0, 1.0)


def test_a_client_needs_a_router() -> None:
    with pytest.raises(ValueError, match="one router at least"):
        Routers([], Retry())


def trailers(*details: Any) -> tuple[tuple[str, bytes], ...]:
    packed = []
    for one in details:
        packed.append(AnyMessage())
        packed[-1].Pack(one)
    return (("other", b"x"), ("grpc-status-details-bin", status_pb2.Status(code=8, details=packed).SerializeToString()))


def test_google_s_own_details_are_read() -> None:
    """The client has messages of its own for them: they must be the same bytes."""
    violation = error_details_pb2.BadRequest.FieldViolation(field="f", description="d")
    error = errors.from_call(grpc.StatusCode.RESOURCE_EXHAUSTED, "m", trailers(
        error_details_pb2.ErrorInfo(reason="R", domain="d", metadata={"k": "v"}),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000)),
        error_details_pb2.BadRequest(field_violations=[violation]),
        error_details_pb2.RequestInfo(request_id="q", serving_data="s"),
        error_details_pb2.Help()), "a:1")
    assert type(error) is errors.OverloadedError
    assert (error.reason, error.request_id, error.retry_after_seconds) == ("R", "q", 2.5)
    assert error.violations == (errors.Violation(field="f", description="d"),)
    assert str(error) == "a:1: m"


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_is_an_error_of_ours(code: grpc.StatusCode) -> None:
    error = errors.from_call(code, "m", (), "a:1")
    assert type(error) is not errors.ClientError
    assert isinstance(error, errors.TooLargeError) is (code is grpc.StatusCode.RESOURCE_EXHAUSTED)
