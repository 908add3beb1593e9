"""How a router is reached: options, TLS, token. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

SERVICE = "/slipstream.inference.v1.Inference/"
MAX_MESSAGE_BYTES = 64 << 20
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A router that is gone without a word is noticed; only while a call is open, and no oftener than servers allow.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),  # whether a call may be sent again is decided here
)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Encrypt, and check the router's certificate. Each file may be given as PEM bytes instead."""

    ca: str | Path | bytes | None = None
    """Authorities that may have signed it; None: those that gRPC brings."""
    cert: str | Path | bytes | None = None
    """The client's own certificate, where the router asks for one, with `key`."""
    key: str | Path | bytes | None = field(default=None, repr=False)
    server_name: str = ""
    """The name in the router's certificate, if it is not the one in its address."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError for a file that cannot be read."""
        return grpc.ssl_channel_credentials(_pem(self.ca), _pem(self.key), _pem(self.cert))

    def options(self) -> tuple[tuple[str, str], ...]:
        """Of a channel."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


def _pem(source: str | Path | bytes | None) -> bytes | None:
    return source if source is None or isinstance(source, bytes) else Path(source).read_bytes()


def metadata(token: str, request_id: str) -> Metadata:
    """Of a call."""
    found = (("authorization", f"Bearer {token}"),) if token else ()
    return (*found, ("x-request-id", request_id)) if request_id else found


def addresses(routers: str | Sequence[str]) -> tuple[str, ...]:
    """One or several `host:port`, also as one text with commas."""
    named = routers.split(",") if isinstance(routers, str) else routers
    return tuple(one.strip() for one in named if one.strip())
