"""What can go wrong with a call, as one tree of exceptions; knows no connection.

A router says what failed in `google.rpc.Status`; what gRPC itself found has no details.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from slipstream_client.v1 import status_pb2


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A field of the request that is wrong."""

    field: str
    description: str


class ClientError(Exception):
    """Every failure of this package. `str()` says what to do about it."""

    def __init__(self, message: str, *, reason: str = "", request_id: str = "", violations: tuple[Violation, ...] = (),
                 retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        """The router's error code, such as `CONTEXT_LENGTH_EXCEEDED`; empty: the failure is not the router's."""
        self.request_id = request_id
        """As the router's log has it; empty where no router answered."""
        self.violations = violations
        self.retry_after_seconds = retry_after_seconds
        """The same request may go well after so long; None: nothing says so."""


class InvalidRequestError(ClientError):
    """The request is wrong; sending it again cannot help. `violations` name the fields."""


class NotFoundError(ClientError):
    """The router does not serve that model, or is no Slipstream router."""


class AuthenticationError(ClientError):
    """The token is missing or wrong."""


class TooLargeError(ClientError):
    """The request is larger than the router takes, or the answer than this client takes."""


class OverloadedError(ClientError):
    """The routers have too much to do; `retry_after_seconds` says when to come back."""


class UnavailableError(ClientError):
    """No router could take the request, or the connection to one was lost."""


class DeadlineError(ClientError):
    """The time was over before the answer was complete."""


class CancelledError(ClientError):
    """The call was cancelled: by `close`, or by the router because the answer was read too slowly."""


class ServerError(ClientError):
    """A fault of the router; its log has more under `request_id`."""


class IncompleteError(ServerError):
    """The answer ended without its last message."""


_KINDS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError, grpc.StatusCode.FAILED_PRECONDITION: ServerError,
    grpc.StatusCode.NOT_FOUND: NotFoundError, grpc.StatusCode.UNIMPLEMENTED: NotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError, grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError, grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
}


def from_call(code: grpc.StatusCode, message: str, trailers: Iterable[Any], address: str) -> ClientError:
    """The exception for a call to `address` that ended with `code`."""
    known: dict[str, bytes] = {}
    for key, value in trailers:
        if key == "grpc-status-details-bin":
            details = status_pb2.Status.FromString(value).details
            known = {one.type_url.rpartition(".")[2]: one.value for one in details}
    info = status_pb2.ErrorInfo.FromString(known.get("ErrorInfo", b""))
    violations = status_pb2.BadRequest.FromString(known.get("BadRequest", b"")).field_violations
    wait = None
    if "RetryInfo" in known:
        delay = status_pb2.RetryInfo.FromString(known["RetryInfo"]).retry_delay
        wait = delay.seconds + delay.nanos / 1e9
    kind = _KINDS.get(code, ServerError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        kind = TooLargeError if wait is None else OverloadedError
    return kind(f"{address}: {message}", reason=info.reason, retry_after_seconds=wait,
                request_id=status_pb2.RequestInfo.FromString(known.get("RequestInfo", b"")).request_id,
                violations=tuple(Violation(field=one.field, description=one.description) for one in violations))
