"""Pictures by URL: from where they are taken, and what of a server is borne. Cases SEC-01, SEC-06."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trustme

from router.fetch import Fetcher
from slipstream.config_fetch import FetchConfig
from slipstream.errors import ConfigError, InvalidRequestError, OverloadedError
from slipstream.text.images import Still
from slipstream.text.videos import Frames

PICTURE = b"\x89PNG and so on"
HERE = "127.0.0.1/32"


class Server:
    """Answers GET as its paths say, and keeps the requests."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.paths: dict[str, bytes] = {"/picture": _reply(PICTURE)}
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            path = head.split(" ")[1]
            if path == "/endless":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(b"x" * 10_000)
                    await writer.drain()
            if path == "/slow":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            writer.write(self.paths.get(path, _reply(b"", "404 Not Found")))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def _reply(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"http{'s' if context else ''}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listening.close()


async def fetched(url: str, *, verify: ssl.SSLContext | None = None, take: Any = lambda count: None, **config: Any) -> bytes:
    fetcher = Fetcher(FetchConfig(**{"domains": ("*",), "networks": (HERE,), "seconds": 2.0, **config}), verify)
    still = Still(url=url, field="messages[0].content[0].image_url")
    await fetcher.fill([still], take)
    assert still.data is not None
    return still.data


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """Names with the addresses that each look-up in turn gives; the others are resolved as ever."""
    known: dict[str, list[list[str]]] = {}
    real = asyncio.BaseEventLoop.getaddrinfo

    async def look_up(loop: Any, host: Any, port: Any, **options: Any) -> Any:
        if host not in known:
            return await real(loop, host, port, **options)
        addresses = known[host].pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)
    return known


async def test_a_picture_comes_as_it_is() -> None:
    async with serving() as server:
        taken: list[int] = []
        assert await fetched(f"{server.url}/picture", take=taken.append) == PICTURE
        assert sum(taken) == len(PICTURE), "who counts memory hears of it"
        assert "accept-encoding: identity" in server.heads[0].lower(), "nothing is unpacked, so nothing can blow up"
        server.paths["/from"] = _reply(b"", "302 Found", location="/picture")
        assert await fetched(f"{server.url}/from") == PICTURE


async def test_one_url_is_fetched_once_for_all_its_pictures() -> None:
    async with serving() as server:
        fetcher = Fetcher(FetchConfig(domains=("*",), networks=(HERE,)))
        stills = [Still(url=f"{server.url}/picture", field=str(i)) for i in range(3)]
        await fetcher.fill(stills, lambda count: None)
        assert [still.data for still in stills] == [PICTURE] * 3
        assert len(server.heads) == 1


def video(*urls: str) -> Frames:
    stills = tuple(Still(url=url, field=f"messages[0].content[0].video[{i}]") for i, url in enumerate(urls))
    return Frames(stills=stills, seconds=tuple(map(float, range(len(urls)))), field="messages[0].content[0].video")


async def test_frames_come_as_pictures_do() -> None:
    """One of them is data already, one is a picture of the request too."""
    async with serving() as server:
        server.paths["/second"] = _reply(PICTURE * 2)
        fetcher = Fetcher(FetchConfig(domains=("*",), networks=(HERE,)))
        clip = video(f"{server.url}/picture", "data:image/png;base64,AAAA", f"{server.url}/second", f"{server.url}/picture")
        still = Still(url=f"{server.url}/picture", field="messages[0].content[1].image_url")
        await fetcher.fill([clip, still], lambda count: None)
        assert [one.file() for one in (*clip.stills, still)] == [PICTURE, bytes(3), PICTURE * 2, PICTURE, PICTURE]
        assert len(server.heads) == 2


@pytest.mark.parametrize(("path", "settings", "words"), [
    ("/nothing", {}, "status 404"), ("/slow", {"seconds": 0.3}, "within 0.3 seconds"),
    ("/slow", {"total_seconds": 0.3}, "1 of 3 pictures did not come within 0.3 seconds"),
    ("/endless", {"max_bytes": 100_000}, "longer than 100000 bytes")])
async def test_the_frame_that_cannot_be_had_is_named(path: str, settings: dict[str, Any], words: str) -> None:
    async with serving() as server:
        server.paths |= {"/a": _reply(PICTURE), "/b": _reply(PICTURE)}
        fetcher = Fetcher(FetchConfig(domains=("*",), networks=(HERE,), **settings))
        with pytest.raises(InvalidRequestError, match=words) as caught:
            await fetcher.fill([video(f"{server.url}/a", f"{server.url}/b", f"{server.url}{path}")], lambda count: None)
    assert caught.value.field == "messages[0].content[0].video[2]"


async def test_without_domains_nothing_is_fetched() -> None:
    async with serving() as server:
        with pytest.raises(InvalidRequestError, match=r"router\.fetch\.domains"):
            await fetched(f"{server.url}/picture", domains=())
        assert not server.heads


@pytest.mark.parametrize(
    ("domains", "taken"),
    [(("127.0.0.1",), True), (("example.com",), False), ((".0.0.1",), True), (("0.0.1",), False), (("EXAMPLE.com", "*"), True)],
)
async def test_domains(domains: tuple[str, ...], taken: bool) -> None:
    async with serving() as server:
        if taken:
            assert await fetched(f"{server.url}/picture", domains=domains) == PICTURE
        else:
            with pytest.raises(InvalidRequestError, match="that host"):
                await fetched(f"{server.url}/picture", domains=domains)


PRIVATE = (
    "127.0.0.2",
    "169.254.169.254",
    "10.0.0.1",
    "192.168.1.1",
    "[::1]",
    "[::ffff:127.0.0.2]",
    "2130706434",
    "0x7f.0.0.2",
    "0177.0.0.2",
    "0.0.0.0",
    "[::]",
    "[64:ff9b::a00:1]",
    "[2002:a00:1::]",
    "[fe80::1]",
    "[fc00::1]",
    "224.0.0.1",
    "100.64.0.1",
    "[::ffff:10.0.0.1]",
    "255.255.255.255",
    "[ff02::1]",
    "[2001:db8::1]",
)


@pytest.mark.parametrize("host", PRIVATE)
@pytest.mark.parametrize("redirected", [False, True])
async def test_addresses_that_are_not_public_are_refused(host: str, redirected: bool) -> None:
    async with serving() as server:
        url = f"http://{host}:1/x"
        if redirected:
            server.paths["/to"] = _reply(b"", "307 Temporary Redirect", location=url)
        with pytest.raises(InvalidRequestError, match=r"not public|gaierror|RemoteProtocolError") as caught:
            await fetched(f"{server.url}/to" if redirected else url, networks=(HERE,) if redirected else ())
        assert caught.value.field == "messages[0].content[0].image_url"
        assert len(server.heads) == redirected


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "gopher://127.0.0.1/",
        "//user@127.0.0.1/",
        "http://[::1",
        "http://127.0.0.1:99999/",
        "data:image/png;base64,AAAA",
    ],
)
async def test_redirects_to_what_is_no_http_url_are_refused(location: str) -> None:
    async with serving() as server:
        server.paths["/to"] = _reply(b"", "302 Found", location=location)
        with pytest.raises(InvalidRequestError):
            await fetched(f"{server.url}/to")
        assert len(server.heads) == 1


async def test_redirects_are_bounded() -> None:
    async with serving() as server:
        server.paths["/to"] = _reply(b"", "302 Found", location="/to")
        with pytest.raises(InvalidRequestError, match="more than 3 redirects"):
            await fetched(f"{server.url}/to")
        assert len(server.heads) == 4


@pytest.mark.parametrize(
    ("path", "settings", "words"),
    [
        ("/endless", {"max_bytes": 100_000}, "longer than 100000 bytes"),
        ("/slow", {"seconds": 0.5}, "within 0.5 seconds"),
        ("/nothing", {}, "status 404"),
    ],
)
async def test_servers_that_want_too_much(path: str, settings: dict[str, Any], words: str) -> None:
    async with serving() as server:
        started = time.monotonic()
        with pytest.raises(InvalidRequestError, match=words):
            await fetched(server.url + path, **settings)
        assert time.monotonic() - started < 1.5


async def test_a_connection_that_nobody_takes() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(InvalidRequestError, match="could not be fetched: ConnectError"):
            await fetched(f"http://127.0.0.1:{closed.getsockname()[1]}/")


async def test_memory_that_is_not_there_is_not_taken() -> None:
    def refuse(count: int) -> None:
        raise OverloadedError("no room")

    async with serving() as server:
        with pytest.raises(OverloadedError):
            await fetched(f"{server.url}/picture", take=refuse)


async def test_the_address_that_was_checked_is_the_one_that_is_asked(names: dict[str, list[list[str]]]) -> None:
    """A name that answers differently the second time is asked once."""
    async with serving() as server:
        port = server.url.rpartition(":")[2]
        names["pictures.test"] = [["127.0.0.1"], ["127.0.0.2"]]
        assert await fetched(f"http://pictures.test:{port}/picture") == PICTURE
        assert names["pictures.test"] == [["127.0.0.2"]]
        assert f"host: pictures.test:{port}" in server.heads[0].lower()


async def test_a_name_with_one_private_address_is_refused(names: dict[str, list[list[str]]]) -> None:
    names["mixed.test"] = [["93.184.215.14", "10.0.0.1"]]
    with pytest.raises(InvalidRequestError, match="not public"):
        await fetched("http://mixed.test/picture")


@pytest.mark.parametrize(("name", "good"), [("pictures.test", True), ("other.test", False)])
async def test_certificates_are_of_the_name_and_not_of_the_address(
    names: dict[str, list[list[str]]], name: str, good: bool
) -> None:
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("pictures.test").configure_cert(ours)
    authority.configure_trust(theirs)
    async with serving(ours) as server:
        names[name] = [["127.0.0.1"]]
        url = server.url.replace("127.0.0.1", name) + "/picture"
        if good:
            assert await fetched(url, verify=theirs) == PICTURE
        else:
            with pytest.raises(InvalidRequestError, match="could not be fetched: ConnectError"):
                await fetched(url, verify=theirs)


def test_public_addresses_are_open() -> None:
    fetcher = Fetcher(FetchConfig(domains=("*",)))
    for address in ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"):
        assert fetcher._is_open(ipaddress.ip_address(address))


def test_a_network_that_is_none_is_refused_with_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"router\.fetch\.networks"):
        FetchConfig(networks=("10.0.0.1/8",))
