"""The exception tree and its one table to gRPC and HTTP statuses; knows neither grpc nor HTTP."""

from __future__ import annotations

from typing import ClassVar


class SlipstreamError(Exception):
    """A failure with a stable `code`; its text says what to do about it.

    Raise the most specific subclass. `field` names the request field or config key at fault, where there is one.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"  # a name of grpc.StatusCode
    openai_type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, field: str | None = None, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_seconds = retry_after_seconds


class InternalError(SlipstreamError):
    """A broken invariant of ours; always a bug."""


# The user's mistakes -------------------------------------------------------------------------------------------------


class InvalidRequestError(SlipstreamError):
    """The request is wrong; sending it again cannot help."""

    code = "invalid_request"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output do not fit the context window."""

    code = "context_length_exceeded"


class AuthenticationError(SlipstreamError):
    """The API key is missing or not known here."""

    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    openai_type = "authentication_error"


class ModelNotFoundError(SlipstreamError):
    """The named model is not served here."""

    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"
    openai_type = "invalid_request_error"


class NotFoundError(SlipstreamError):
    """There is nothing of that name, or not any more."""

    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"
    openai_type = "invalid_request_error"


class RequestTooLargeError(SlipstreamError):
    """The body is larger than the configured limit."""

    code = "request_too_large"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "invalid_request_error"


class ConfigError(SlipstreamError):
    """A configuration file, an override or a checkpoint folder is wrong; found at start-up."""

    code = "config"
    grpc_status = "FAILED_PRECONDITION"


class CheckpointError(ConfigError):
    """A checkpoint is missing something, or holds something of the wrong shape; names the tensor or file."""

    code = "checkpoint"


# Load and life cycle -------------------------------------------------------------------------------------------------


class OverloadedError(SlipstreamError):
    """Too much work is waiting; the client should come back after `retry_after_seconds`."""

    code = "overloaded"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"


class UnavailableError(SlipstreamError):
    """Nothing can take the request now: draining, no replica of a role, a peer or link lost."""

    code = "unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class BusyError(UnavailableError):
    """This replica has no memory for the request; another may take it."""

    code = "busy"


class PreemptedError(UnavailableError):
    """Decode took the request's memory back for older ones; the router resumes it from the tokens that it has."""

    code = "preempted"


class LeaseExpiredError(UnavailableError):
    """A parked transfer found no decode replica in time."""

    code = "lease_expired"


class GangError(UnavailableError):
    """A rank of this replica is lost, or the ranks do not agree: the whole replica ends, and is started again."""

    code = "gang"


class LaunchError(SlipstreamError):
    """A process of the deployment did not start, or nothing serves where it was looked for; the text says what to look at."""

    code = "launch"


class PlacementError(LaunchError):
    """Ray has no room for a process; names the bundle and what every node lacks."""

    code = "placement"


class DeadlineError(SlipstreamError):
    """The request's deadline passed before it ended."""

    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class CancelledError(SlipstreamError):
    """The client went away or cancelled."""

    code = "cancelled"
    http_status = 499
    grpc_status = "CANCELLED"


class SlowClientError(CancelledError):
    """The client left more output unread than the configured bound."""

    code = "slow_client"


# Between workers -----------------------------------------------------------------------------------------------------


class TransferError(SlipstreamError):
    """Bytes did not arrive, or not all of them."""

    code = "transfer_failed"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class StalledError(TransferError):
    """Nothing of it moved for `transfer.stall_seconds`; the text says how much had come."""

    code = "transfer_stalled"


class CoverageError(TransferError):
    """A transfer ended without covering every byte that it promised."""

    code = "coverage"


class IncompatibleError(TransferError):
    """The two sides of a transfer hold different layouts; the text names the fields and both values."""

    code = "incompatible"
    grpc_status = "FAILED_PRECONDITION"


class ProtocolError(TransferError):
    """A peer broke the transfer protocol; fails one request, never the process."""

    code = "protocol"


def _tree(root: type[SlipstreamError]) -> list[type[SlipstreamError]]:
    return [root] + [leaf for child in root.__subclasses__() for leaf in _tree(child)]


def by_code(code: str, message: str) -> SlipstreamError:
    """The exception that a peer named by `code`; an unknown code becomes an InternalError that quotes it."""
    for kind in _tree(SlipstreamError):
        if kind.code == code and kind is not SlipstreamError:
            return kind(message)
    return InternalError(f"{code}: {message}")
