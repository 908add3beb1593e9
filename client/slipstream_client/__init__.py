"""A client of Slipstream's gRPC API, sync and asyncio. Needs grpcio and protobuf, and nothing of the server."""

from slipstream_client.aio import AsyncClient, AsyncStream
from slipstream_client.channel import Tls
from slipstream_client.client import Client, Stream
from slipstream_client.errors import (
    AuthenticationError,
    CancelledError,
    ClientError,
    DeadlineError,
    IncompleteError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerError,
    TooLargeError,
    UnavailableError,
    Violation,
)
from slipstream_client.routers import Retry
from slipstream_client.types import (
    Answer,
    ChatRequest,
    Choice,
    Delta,
    GenerateRequest,
    Image,
    Load,
    Message,
    Model,
    Replica,
    Sampling,
    Stop,
    TokenLogprob,
    Usage,
    Video,
    assistant,
    system,
    user,
)

__version__ = "0.1.0"

__all__ = [
    "Answer", "AsyncClient", "AsyncStream", "AuthenticationError", "CancelledError", "ChatRequest", "Choice", "Client",
    "ClientError", "DeadlineError", "Delta", "GenerateRequest", "Image", "IncompleteError", "InvalidRequestError", "Load",
    "Message", "Model", "NotFoundError", "OverloadedError", "Replica", "Retry", "Sampling", "ServerError", "Stop", "Stream",
    "Tls", "TokenLogprob", "TooLargeError", "UnavailableError", "Usage", "Video", "Violation", "assistant", "system", "user",
]
