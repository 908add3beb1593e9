"""Client channels: one set of options for every gRPC connection between our processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
import grpc.aio

from slipstream.rpc.security import OPEN, Metadata, Security

KEEPALIVE_SECONDS = 10.0
ANSWER_SECONDS = 5.0
"""A peer that leaves a ping without answer for so long is lost."""
MAX_MESSAGE_BYTES = 64 << 20

NOT_THERE = "nothing listens there"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(ANSWER_SECONDS * 1000)),
    # Of pings that gRPC sends for reasons of its own: while one is out there is no keepalive ping, and it would wait a minute.
    ("grpc.http2.ping_timeout_ms", int(ANSWER_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)


def reason(error: grpc.aio.AioRpcError) -> str:
    """Why a call failed, in plain words where gRPC's own speak of sockets."""
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if "handshake" in str(error.details()).lower():
            return f"no TLS connection to it, see docs/security.md ({error.details()})"
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return NOT_THERE if "failed to connect" in str(error.details()).lower() else "the connection was lost"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "it does not answer"
        case code:
            return f"{code.name}: {error.details()}"


def connect(address: str, security: Security = OPEN) -> grpc.aio.Channel:
    """A lazy channel to `host:port` or `[v6]:port`; reconnects with a back-off of at most two seconds."""
    options = [*OPTIONS, *security.options, ("grpc.max_reconnect_backoff_ms", 2000), ("grpc.use_local_subchannel_pool", 1)]
    credentials = security.channel_credentials()
    channel = (grpc.aio.insecure_channel(address, options=options) if credentials is None
               else grpc.aio.secure_channel(address, credentials, options=options))
    return _Authorized(channel, security.metadata) if security.metadata else channel


def connect_blocking(address: str, security: Security = OPEN) -> grpc.Channel:
    """For code without an event loop. Calls on it have to be given `security.metadata`."""
    options, credentials = [*OPTIONS, *security.options], security.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


class _Authorized(grpc.aio.Channel):
    """A channel whose calls all carry the same metadata. No interceptor: those of grpc.aio put a queue and a task of their own
    into every stream; no call credentials: those refuse plaintext."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return partial(self._channel.unary_unary(*args, **kwargs), metadata=self._metadata)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return partial(self._channel.unary_stream(*args, **kwargs), metadata=self._metadata)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return partial(self._channel.stream_unary(*args, **kwargs), metadata=self._metadata)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return partial(self._channel.stream_stream(*args, **kwargs), metadata=self._metadata)

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        await self._channel.close(grace)

    async def __aenter__(self) -> _Authorized:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._channel.channel_ready()
