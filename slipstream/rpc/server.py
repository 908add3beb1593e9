"""gRPC servers: the same options everywhere, and the address that was really bound."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from slipstream.errors import ConfigError, InvalidRequestError
from slipstream.rpc.channel import KEEPALIVE_SECONDS, OPTIONS
from slipstream.rpc.security import OPEN, Security

logger = logging.getLogger(__name__)

M = TypeVar("M")


async def messages(requests: AsyncIterator[M]) -> AsyncIterator[M]:
    """The messages of a request stream. Raises InvalidRequestError for bytes that are none."""
    try:
        async for message in requests:
            yield message
    except DecodeError as error:
        raise InvalidRequestError(f"bytes that are no message: {error}") from error


def new_server(security: Security = OPEN) -> grpc.aio.Server:
    """A server without services; add them, then `listen`."""
    return grpc.aio.server(interceptors=security.interceptors, options=[*OPTIONS, ("grpc.so_reuseport", 0), (
        "grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_SECONDS * 500))])


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host, port), brackets removed. Raises ConfigError for anything else."""
    host, separator, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not an address; write host:port, or [host]:port for IPv6")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound(address: str, flag: str) -> socket.socket:
    """A listening socket (port 0: any free one). Raises ConfigError naming `flag` for an address that is taken or not ours."""
    host, port = split_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}; choose another {flag}, or port 0 for any free "
                          "one") from error


def reserved(host: str) -> socket.socket:
    """A port of `host` that nobody gets who asks for any free one; who knows it may listen there."""
    family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(where[:2])
    return holder


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def listen(server: grpc.aio.Server, address: str, security: Security = OPEN) -> str:
    """Bind (port 0: any free one), start, and return the address with the port that was bound.

    Raises ConfigError naming the address when it is taken.
    """
    host, _ = split_address(address)
    credentials = security.server_credentials()
    if security.token and not security.tls and not _is_loopback(host):
        logger.warning("the token of security.token_file is sent in plaintext to %s: whoever can read this network learns it; "
                       "security.tls_cert, tls_key and tls_ca encrypt", host)
    try:
        port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; choose another port, or 0 for any free one") from error
    await server.start()
    return join_address(host, port)
