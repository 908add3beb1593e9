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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from slipstream.config import Config
from slipstream.config_access import SecurityConfig
from slipstream.errors import ConfigError

logger = logging.getLogger(__name__)

LEAST_TOKEN = 16
LOG_SECONDS = 10.0
"""Of several refusals in so long one is logged."""
OPEN_METHOD = "/grpc.health.v1.Health/Check"
"""Needs no token: a kubelet has none, and the answer is one word."""
REFUSAL = "the token is missing or is not this deployment's: security.token_file must name the same token on both sides"
CLIENT_REFUSAL = "the token is missing or is not one of this router's: send it as metadata, authorization: Bearer TOKEN"

Metadata = tuple[tuple[str, str], ...]
Accepts = Callable[[str], bool]
"""Whether an `authorization`, or none (empty), opens a server."""


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
        """True: connections are encrypted, and both ends show certificates (clients of routers only where there is a `ca`)."""
        return bool(self.cert)

    @property
    def metadata(self) -> Metadata:
        """Of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def options(self) -> list[tuple[str, str | int]]:
        """Of every channel."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.tls and self.server_name else []

    def interceptors(self, refusal: str, accepts: Accepts | None = None) -> list[grpc.aio.ServerInterceptor]:
        """Of every server; `refusal` is what it says to whoever lacks the token, or is not who `accepts` knows instead."""
        if accepts is None and self.token:
            accepts = _Token(self.token)
        return [_Doorman(accepts, refusal)] if accepts is not None else []

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None: plaintext."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert) if self.tls else None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None: plaintext."""
        if not self.tls:
            return None
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca or None, require_client_auth=bool(self.ca))


OPEN = Security()
"""Nothing is configured: everybody may talk to everybody."""


def load(config: SecurityConfig) -> Security:
    """Raises ConfigError naming the field whose file is missing, unreadable, or does not fit the others."""
    return _load(config, "security", ("tls_cert", "tls_key", "tls_ca"))


def for_clients(config: Config) -> Security:
    """Of a router's public server: `[router.grpc]`, and what is not said there as in `[security]`. Raises ConfigError."""
    own = config.router.grpc
    result = load(config.security)
    if own.token_file:
        result = replace(result, token=_load(SecurityConfig(token_file=own.token_file), "router.grpc", ()).token)
    if own.tls_cert or own.tls_key or own.tls_ca:
        tls = SecurityConfig(tls_cert=own.tls_cert, tls_key=own.tls_key, tls_ca=own.tls_ca)
        result = replace(_load(tls, "router.grpc", ("tls_cert", "tls_key")), token=result.token)
    return result


def _load(config: SecurityConfig, section: str, together: tuple[str, ...]) -> Security:
    tls = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
    token = _token(config.token_file, section) if config.token_file else ""
    if not any(tls.values()):
        if config.tls_server_name:
            raise _error(section, "tls_server_name", "is of no use without tls_cert, tls_key and tls_ca")
        return Security(token=token)
    for name in together:
        if not tls[name]:
            raise _error(section, name, f"is missing: {', '.join(together[:-1])} and {together[-1]} go together")
    cert, key, ca = (_read(section, name, path) if path else b"" for name, path in tls.items())
    _verify(config, section)
    return Security(token=token, cert=cert, key=key, ca=ca, server_name=config.tls_server_name)


def _token(path: str, section: str) -> str:
    token = _read(section, "token_file", path).decode("latin-1").strip()
    if len(token) < LEAST_TOKEN or not all("!" <= letter <= "~" for letter in token):
        raise _error(section, "token_file", f"{path} must hold one token of at least {LEAST_TOKEN} printable characters "
                     f"without spaces; make one: openssl rand -hex 32 > {path}")
    return token


def _read(section: str, name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _error(section, name, f"cannot read {path}: {error.strerror}") from error


def _verify(config: SecurityConfig, section: str) -> None:
    """gRPC would find what is wrong here at the first connection, and say it badly."""
    try:
        if config.tls_ca:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(config.tls_ca)
    except (ssl.SSLError, ValueError) as error:
        raise _error(section, "tls_ca", f"{config.tls_ca} holds no certificate in PEM form") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(config.tls_cert)
    except (ssl.SSLError, ValueError) as error:
        raise _error(section, "tls_cert", f"{config.tls_cert} holds no certificate in PEM form") from error
    try:
        # A password is never asked for at a terminal: a key that needs one is refused.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, password=lambda: b"")
    except ssl.SSLError as error:
        wrong = "is not the key of" if error.reason == "KEY_VALUES_MISMATCH" else "is no private key, without a password, for"
        raise _error(section, "tls_key", f"{config.tls_key} {wrong} {config.tls_cert}") from error


def _error(section: str, name: str, text: str) -> ConfigError:
    return ConfigError(f"{section}.{name}: {text}", field=f"{section}.{name}")


class _Token:
    """The one that is accepted."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}".encode()

    def __call__(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(), self._wanted)


class _Doorman(grpc.aio.ServerInterceptor):
    """Lets calls in whose `authorization` is accepted. A refused one is answered before any message of it is read."""

    def __init__(self, accepts: Accepts, refusal: str) -> None:
        self._says = refusal
        self._accepts = accepts
        self._logged = -math.inf
        # Fits every kind of call: it awaits no message.
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
                                details: grpc.HandlerCallDetails) -> Any:
        """See grpc.aio.ServerInterceptor."""
        shown = [value for key, value in details.invocation_metadata if key == "authorization"]
        told = shown[0] if len(shown) == 1 else ""
        if details.method == OPEN_METHOD or self._accepts(told if isinstance(told, str) else ""):
            return await continuation(details)
        return self._refusal

    async def _refuse(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        if (now := time.monotonic()) > self._logged + LOG_SECONDS:
            self._logged = now
            logger.warning("a call from %s was refused: %s", context.peer(), self._says)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, self._says)
        raise AssertionError("abort raises")
