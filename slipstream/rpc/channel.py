"""Client channels: one set of options for every gRPC connection between our processes."""

from __future__ import annotations

import grpc
import grpc.aio

KEEPALIVE_SECONDS = 10.0
ANSWER_SECONDS = 5.0
"""A peer that leaves a ping without answer for so long is lost."""
MAX_MESSAGE_BYTES = 64 << 20

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
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return "nothing listens there" if "failed to connect" in str(error.details()).lower() else "the connection was lost"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "it does not answer"
        case code:
            return f"{code.name}: {error.details()}"


def connect(address: str) -> grpc.aio.Channel:
    """A lazy channel to `host:port` or `[v6]:port`; reconnects with a back-off of at most two seconds."""
    return grpc.aio.insecure_channel(address, options=[*OPTIONS, ("grpc.max_reconnect_backoff_ms", 2000),
                                                       ("grpc.use_local_subchannel_pool", 1)])
