"""Who may talk to our processes over gRPC: the token and the certificates of `[security]`. Knows no service but health.

The token is metadata of every call, which each server compares before it reads a message. It proves the caller to the server
alone; certificates prove both to each other, and encrypt.
"""

from __future__ import annotations

import hmac
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from slipstream.config import SecurityConfig
from slipstream.errors import ConfigError

logger = logging.getLogger(__name__)

LEAST_TOKEN = 16
LOG_SECONDS = 10.0
"""Of several refusals in so long one is logged."""
OPEN_METHOD = "/grpc.health.v1.Health/Check"
"""Needs no token: a kubelet has none, and the answer is one word."""
REFUSAL = "the token is missing or is not this deployment's: security.token_file must name the same token on both sides"

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Security:
    """What was read. Nothing of it is ever shown: `repr` says no more than what is used."""

    token: str = field(default="", repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)
    server_name: str = ""

    @property
    def tls(self) -> bool:
        """True: connections are encrypted, and both ends show certificates."""
        return bool(self.cert)

    @property
    def metadata(self) -> Metadata:
        """Of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def options(self) -> list[tuple[str, str | int]]:
        """Of every channel."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.tls and self.server_name else []

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Of every server."""
        return [_Doorman(self.token)] if self.token else []

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None: plaintext."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert) if self.tls else None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None: plaintext."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True) if self.tls else None


OPEN = Security()
"""Nothing is configured: everybody may talk to everybody."""


def load(config: SecurityConfig) -> Security:
    """Raises ConfigError naming the field whose file is missing, unreadable, or does not fit the others."""
    tls = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
    token = _token(config.token_file) if config.token_file else ""
    missing = [name for name, path in tls.items() if not path]
    if len(missing) == len(tls):
        if config.tls_server_name:
            raise _error("tls_server_name", "is of no use without tls_cert, tls_key and tls_ca")
        return Security(token=token)
    if missing:
        raise _error(missing[0], "is missing: tls_cert, tls_key and tls_ca go together")
    cert, key, ca = (_read(name, path) for name, path in tls.items())
    _verify(config)
    return Security(token=token, cert=cert, key=key, ca=ca, server_name=config.tls_server_name)


def _token(path: str) -> str:
    token = _read("token_file", path).decode("latin-1").strip()
    if len(token) < LEAST_TOKEN or not all("!" <= letter <= "~" for letter in token):
        raise _error("token_file", f"{path} must hold one token of at least {LEAST_TOKEN} printable characters without spaces; "
                     f"make one: openssl rand -hex 32 > {path}")
    return token


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _error(name, f"cannot read {path}: {error.strerror}") from error


def _verify(config: SecurityConfig) -> None:
    """gRPC would find what is wrong here at the first connection, and say it badly."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(config.tls_ca)
    except (ssl.SSLError, ValueError) as error:
        raise _error("tls_ca", f"{config.tls_ca} holds no certificate in PEM form") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(config.tls_cert)
    except (ssl.SSLError, ValueError) as error:
        raise _error("tls_cert", f"{config.tls_cert} holds no certificate in PEM form") from error
    try:
        # A password is never asked for at a terminal: a key that needs one is refused.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, password=lambda: b"")
    except ssl.SSLError as error:
        wrong = "is not the key of" if error.reason == "KEY_VALUES_MISMATCH" else "is no private key, without a password, for"
        raise _error("tls_key", f"{config.tls_key} {wrong} {config.tls_cert}") from error


def _error(name: str, text: str) -> ConfigError:
    return ConfigError(f"security.{name}: {text}", field=f"security.{name}")


class _Doorman(grpc.aio.ServerInterceptor):
    """Lets calls with the right token in. A refused one is answered before any message of it is read."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()
        self._logged = -math.inf
        # Fits every kind of call: it awaits no message.
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
                                details: grpc.HandlerCallDetails) -> Any:
        """See grpc.aio.ServerInterceptor."""
        shown = [value for key, value in details.invocation_metadata if key == "authorization"]
        told = shown[0] if len(shown) == 1 else ""
        if hmac.compare_digest(told.encode() if isinstance(told, str) else told, self._wanted) or details.method == OPEN_METHOD:
            return await continuation(details)
        return self._refusal

    async def _refuse(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        if (now := time.monotonic()) > self._logged + LOG_SECONDS:
            self._logged = now
            logger.warning("a call from %s was refused: %s", context.peer(), REFUSAL)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
        raise AssertionError("abort raises")
