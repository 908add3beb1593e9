"""Who is let in: by token, by certificate, on all four kinds of call, with raw bytes; everybody else is refused at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from slipstream.config import SecurityConfig
from slipstream.errors import ConfigError
from slipstream.rpc import security
from slipstream.rpc.channel import connect, connect_blocking
from slipstream.rpc.security import OPEN, Security
from slipstream.rpc.server import listen, new_server
from tests.support.certificates import NAME, TOKEN, Authority, token_file

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
OTHER = Security(token="another-token-of-some-length")


@asynccontextmanager
async def serving(trusted: Security) -> AsyncIterator[str]:
    """A server with raw handlers of every kind, and health."""
    async def one(request: Any, context: Any) -> bytes:
        return request if isinstance(request, bytes) else b"".join([part async for part in request])

    async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
        for part in [request] if isinstance(request, bytes) else [part async for part in request]:
            yield part

    server = new_server(trusted)
    handlers: dict[str, Any] = {"unary_unary": grpc.unary_unary_rpc_method_handler(one),
                "unary_stream": grpc.unary_stream_rpc_method_handler(many),
                "stream_unary": grpc.stream_unary_rpc_method_handler(one),
                "stream_stream": grpc.stream_stream_rpc_method_handler(many)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    address = await listen(server, "127.0.0.1:0", trusted)
    yield address
    await server.stop(None)


async def ask(channel: grpc.aio.Channel, kind: str) -> bytes:
    """What the server echoes; the request is one message of a megabyte, so that it cannot be sent before the answer."""
    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * (1 << 20)

    call = getattr(channel, kind)(f"/Echo/{kind}")(b"x" * (1 << 20) if kind.startswith("unary") else parts(), timeout=20)
    return b"".join([part async for part in call]) if kind.endswith("stream") else await call


async def refusal(address: str, trusted: Security, kind: str = "unary_unary") -> grpc.aio.AioRpcError:
    """How a caller is refused, within two seconds."""
    started = time.monotonic()
    async with connect(address, trusted) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(channel, kind)
    assert time.monotonic() - started < 2
    return error.value


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def loaded(token: Path | str = "", **tls: str) -> Security:
    return security.load(SecurityConfig(token_file=str(token), **tls))


@pytest.fixture(params=["token", "mtls", "both"])
def trusted(request: pytest.FixtureRequest, tmp_path: Path, authority: Authority) -> Security:
    token = token_file(tmp_path) if request.param != "mtls" else ""
    return loaded(token, **(authority.settings() if request.param != "token" else {}))


@pytest.mark.parametrize("kind", KINDS)
async def test_who_belongs_is_served_on_every_kind_of_call(trusted: Security, kind: str) -> None:
    async with serving(trusted) as address, connect(address, trusted) as channel:
        assert await ask(channel, kind) == b"x" * (1 << 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [OPEN, OTHER, Security(token=TOKEN[:-1]), Security(token=TOKEN + "x")],
                         ids=["none", "another", "shorter", "longer"])
async def test_a_wrong_token_is_refused_by_a_message_that_names_the_key(kind: str, wrong: Security, tmp_path: Path,
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    async with serving(loaded(token_file(tmp_path))) as address:
        error = await refusal(address, wrong, kind)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "security.token_file" in (error.details() or "")
    assert "security.token_file" in caplog.text, "the server's log says so too"
    assert TOKEN not in caplog.text + (error.details() or "")


async def test_neither_a_token_nor_a_certificate_is_enough_where_both_are_asked(tmp_path: Path, authority: Authority) -> None:
    both = loaded(token_file(tmp_path), **authority.settings())
    async with serving(both) as address:
        assert (await refusal(address, Security(token=TOKEN))).code() is grpc.StatusCode.UNAVAILABLE
        assert (await refusal(address, replace(both, token=""))).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_other_certificates_are_refused_at_both_ends(tmp_path: Path, authority: Authority) -> None:
    good = loaded(**authority.settings())
    stranger = loaded(**Authority(tmp_path, "other").settings())
    expired = loaded(**authority.settings(expired=True))
    async with serving(good) as address:
        for wrong in (stranger, replace(stranger, ca=good.ca), expired, replace(good, server_name="another.internal"), OPEN):
            assert (await refusal(address, wrong)).code() is grpc.StatusCode.UNAVAILABLE
        bare = grpc.ssl_channel_credentials(good.ca)  # no certificate of the client
        async with grpc.aio.secure_channel(address, bare, options=good.options) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(channel, "unary_unary")
    for server in (expired, stranger):
        async with serving(server) as address:
            error = await refusal(address, good)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "CERTIFICATE_VERIFY_FAILED" in (error.details() or "")


async def test_only_the_health_check_is_open_without_a_token(tmp_path: Path) -> None:
    async with serving(loaded(token_file(tmp_path))) as address, connect(address) as channel:
        said = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert said.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            async for _ in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=5):
                pass


async def test_a_client_without_an_event_loop_is_let_in(trusted: Security) -> None:
    def blocking(address: str) -> bytes:
        with connect_blocking(address, trusted) as channel:
            call: Any = channel.unary_unary("/Echo/unary_unary")
            return bytes(call(b"hello", timeout=5, metadata=trusted.metadata))

    async with serving(trusted) as address:
        assert await asyncio.to_thread(blocking, address) == b"hello"


async def test_a_token_in_plaintext_beyond_loopback_is_told_once(tmp_path: Path, authority: Authority,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    token = token_file(tmp_path)
    for trusted, host, told in ((loaded(token), "127.0.0.1", 0), (loaded(token, **authority.settings()), "0.0.0.0", 0),
                                (OPEN, "0.0.0.0", 0), (loaded(token), "0.0.0.0", 1)):
        server = new_server(trusted)
        await listen(server, f"{host}:0", trusted)
        await server.stop(None)
        assert caplog.text.count("in plaintext") == told
    assert TOKEN not in caplog.text + repr(loaded(token))


@pytest.mark.parametrize(("change", "field", "says"), [
    (lambda own, other: own | {"tls_key": ""}, "tls_key", "go together"),
    (lambda own, other: {"tls_ca": own["tls_ca"]}, "tls_cert", "go together"),
    (lambda own, other: {"tls_server_name": NAME}, "tls_server_name", "no use"),
    (lambda own, other: own | {"tls_cert": "/nowhere"}, "tls_cert", "cannot read /nowhere: No such file"),
    (lambda own, other: own | {"tls_ca": own["tls_key"]}, "tls_ca", "no certificate"),
    (lambda own, other: own | {"tls_cert": own["tls_key"]}, "tls_cert", "no certificate"),
    (lambda own, other: own | {"tls_key": own["tls_cert"]}, "tls_key", "no private key"),
    (lambda own, other: own | {"tls_key": other["tls_key"]}, "tls_key", "is not the key of"),
    (lambda own, other: {"token_file": "/nowhere"}, "token_file", "cannot read /nowhere"),
    (lambda own, other: {"token_file": "/dev/null"}, "token_file", "at least 16"),
    (lambda own, other: {"token_file": own["tls_cert"]}, "token_file", "without spaces"),
])
def test_what_is_wrong_with_a_file_names_its_key(change: Callable[[dict[str, str], dict[str, str]], dict[str, str]], field: str,
                                                 says: str, tmp_path: Path, authority: Authority) -> None:
    own, other = authority.settings(), Authority(tmp_path, "other").settings()
    with pytest.raises(ConfigError, match=says) as error:
        security.load(SecurityConfig(**change(own, other)))
    assert error.value.field == f"security.{field}"
    assert error.value.message.startswith(f"security.{field}")
