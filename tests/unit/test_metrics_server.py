"""The small HTTP server of a worker's metrics: what it answers, and that no client can hold it up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from slipstream.errors import ConfigError
from worker import metrics
from worker.metrics import MetricsServer, metrics_target, reachable


@pytest.fixture
async def address() -> AsyncIterator[str]:
    registry = CollectorRegistry()
    Counter("apples", "Apples.", registry=registry).inc(3)
    server = MetricsServer(registry)
    yield await server.listen("127.0.0.1:0")
    server.close()


async def raw(address: str, request: bytes) -> bytes:
    """All that comes back; empty if the connection ends without a word."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_it_answers_get_metrics_and_nothing_else(address: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address}") as client:
        for path in ("/metrics", "/metrics?name=apples_total"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain; version=")
            assert "apples_total 3.0" in answer.text
        assert (await client.get("/")).status_code == 404
        assert (await client.get("/metrics/../etc")).status_code == 404
        refused = await client.post("/metrics", content=b"x")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("request_", [b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n"])
async def test_rubbish_gets_a_404(address: str, request_: bytes) -> None:
    assert (await raw(address, request_)).startswith(b"HTTP/1.1 404 ")


async def test_a_head_that_does_not_end_is_cut_off(address: str) -> None:
    assert await raw(address, b"GET /metrics HTTP/1.1\r\nx: " + b"a" * (4 * metrics.MAX_HEAD_BYTES)) == b""


async def test_slow_clients_neither_block_others_nor_pile_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ANSWER_SECONDS", 0.5)
    host, port = address.split(":")
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(metrics.MAX_CONNECTIONS - 1)]
    for _, writer in slow:
        writer.write(b"GET /metr")
        await writer.drain()
    assert b"apples_total 3.0" in await raw(address, b"GET /metrics HTTP/1.1\r\n\r\n"), "one place is left"
    slow.append(await asyncio.open_connection(host, int(port)))
    assert await raw(address, b"GET /metrics HTTP/1.1\r\n\r\n") == b"", "one too many is closed at once"
    for reader, writer in slow:  # their time is over
        assert await reader.read() == b""
        writer.close()
    assert b"apples_total 3.0" in await raw(address, b"GET /metrics HTTP/1.1\r\n\r\n")


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*in use.*--metrics-listen"):
            await MetricsServer(CollectorRegistry()).listen(f"127.0.0.1:{port}")


@pytest.mark.parametrize(("listen", "wanted", "target"), [
    ("127.0.0.1:4000", None, "127.0.0.1:0"), ("[::]:0", None, "[::]:0"), ("0.0.0.0:1", "127.0.0.1:9", "127.0.0.1:9"),
    ("127.0.0.1:1", "", "")])
def test_where_metrics_are_served(listen: str, wanted: str | None, target: str) -> None:
    assert metrics_target(listen, wanted) == target


def test_a_target_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError):
        metrics_target("127.0.0.1:1", "9100")


@pytest.mark.parametrize(("bound", "listen", "address", "told"), [
    ("127.0.0.1:9", "127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:9"),
    ("0.0.0.0:9", "0.0.0.0:1", "10.1.2.3:1", "10.1.2.3:9"),
    ("[::]:9", "10.1.2.3:1", "10.1.2.3:1", "10.1.2.3:9"),
    ("10.1.2.3:9", "10.1.2.3:1", "host.example:81", "host.example:9"),
    ("127.0.0.1:9", "0.0.0.0:1", "10.1.2.3:1", "127.0.0.1:9"),
    ("[::1]:9", "[::1]:1", "[::1]:1", "[::1]:9"),
])
def test_what_others_are_told(bound: str, listen: str, address: str, told: str) -> None:
    assert reachable(bound, listen, address) == told
