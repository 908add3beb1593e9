"""Fetches the pictures and frames that requests name by http(s) URL, from where the configuration allows it, and nowhere else.

A name is resolved here, once, every address that it has is checked, and the connection goes to one of those: a name that
answers differently the next time leads nowhere else. Every redirect is checked as the first URL was.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from urllib.parse import urljoin, urlsplit

import httpx

from router.legs import first_of
from slipstream.config_fetch import FetchConfig
from slipstream.errors import InvalidRequestError, SlipstreamError
from slipstream.text.images import Still
from slipstream.text.videos import Frames

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "slipstream"}


class Fetcher:
    """One per router."""

    def __init__(self, config: FetchConfig, verify: ssl.SSLContext | None = None) -> None:
        """`verify`: by which certificates of servers are checked; None: the usual authorities."""
        self._config = config
        self._verify = verify or (httpx.create_ssl_context(trust_env=False) if config.domains else True)
        self._networks = [ipaddress.ip_network(network) for network in config.networks]
        self._turns = asyncio.Semaphore(config.concurrent)

    async def fill(self, media: Sequence[Still | Frames], take: Callable[[int], None]) -> None:
        """Put the file of every picture and frame of an http(s) URL beside it; the first that cannot be had ends the others.
        `take` hears of bytes before they are kept, and may raise. Raises InvalidRequestError, which names that one."""
        wanted: dict[str, list[Still]] = {}
        for item in media:
            for still in [item] if isinstance(item, Still) else item.stills:
                if still.url[:8].lower().startswith(("http://", "https://")):
                    wanted.setdefault(still.url, []).append(still)
        if not wanted:
            return
        try:
            async with asyncio.timeout(self._config.total_seconds):
                await self._fill_all(list(wanted.values()), take)
        except TimeoutError as error:
            late = [stills[0].field for stills in wanted.values() if stills[0].data is None]
            raise InvalidRequestError(f"{len(late)} of {len(wanted)} pictures did not come within "
                                      f"{self._config.total_seconds:g} seconds (router.fetch.total_seconds)",
                                      field=late[0] if late else None) from error

    async def _fill_all(self, wanted: Sequence[Sequence[Still]], take: Callable[[int], None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for stills in wanted:
                    group.create_task(self._fill(stills, take))
        except* SlipstreamError as errors:
            raise first_of(errors) from None

    async def _fill(self, stills: Sequence[Still], take: Callable[[int], None]) -> None:
        url, field = stills[0].url, stills[0].field
        if not self._config.domains:
            raise InvalidRequestError("pictures by http(s) URL are not fetched here (router.fetch.domains); send the picture "
                                      "itself as a data URL: data:image/png;base64,...", field=field)
        async with self._turns:
            try:  # a client for each picture: no connection and no cookie of another request is used
                async with asyncio.timeout(self._config.seconds), httpx.AsyncClient(
                        verify=self._verify, trust_env=False, follow_redirects=False, timeout=None) as client:
                    data = await self._fetch(client, url, field, take)
            except TimeoutError as error:
                raise InvalidRequestError(f"the picture did not come within {self._config.seconds:g} seconds (router.fetch."
                                          "seconds)", field=field) from error
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
                raise InvalidRequestError(f"the picture could not be fetched: {type(error).__name__}", field=field) from error
        for still in stills:
            still.data = data

    async def _fetch(self, client: httpx.AsyncClient, url: str, field: str, take: Callable[[int], None]) -> bytes:
        for _ in range(self._config.max_redirects + 1):
            host, port, pinned = await self._pinned(url, field)
            name = f"[{host}]" if ":" in host else host
            headers = {**_HEADERS, "host": name if port is None else f"{name}:{port}"}
            async with client.stream("GET", pinned, headers=headers, extensions={"sni_hostname": host}) as reply:
                if reply.is_redirect and "location" in reply.headers:
                    url = urljoin(url, reply.headers["location"])
                    continue
                if reply.status_code != 200:
                    raise InvalidRequestError(f"the picture could not be fetched: status {reply.status_code}", field=field)
                data = bytearray()
                async for chunk in reply.aiter_raw():
                    if len(data) + len(chunk) > self._config.max_bytes:
                        raise InvalidRequestError(f"the picture is longer than {self._config.max_bytes} bytes (router.fetch."
                                                  "max_bytes)", field=field)
                    take(len(chunk))
                    data += chunk
                return bytes(data)
        raise InvalidRequestError(f"more than {self._config.max_redirects} redirects lead to the picture (router.fetch."
                                  "max_redirects)", field=field)

    async def _pinned(self, url: str, field: str) -> tuple[str, int | None, httpx.URL]:
        """The host and port that a URL names, and the URL of the address that was checked."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").encode("idna").decode().rstrip("."), parts.port
        except ValueError as error:
            raise InvalidRequestError("the picture's URL is not valid", field=field) from error
        if parts.scheme.lower() not in ("http", "https") or not host or parts.username is not None:
            raise InvalidRequestError("the picture's URL must be http(s)://HOST/..., without a user", field=field)
        if not self._allows(host):
            raise InvalidRequestError("pictures are not fetched from that host, or it redirects to another (router.fetch."
                                      "domains)", field=field)
        found = await asyncio.get_running_loop().getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(info[4][0]) for info in found]
        if not addresses or not all(map(self._is_open, addresses)):
            raise InvalidRequestError("the picture's URL leads to an address that is not public (router.fetch.networks)",
                                      field=field)
        return host, port, httpx.URL(url).copy_with(host=str(addresses[0]))

    def _allows(self, host: str) -> bool:
        domains = (domain.lower() for domain in self._config.domains)
        return any(domain in ("*", host.lower()) or (domain.startswith(".") and host.lower().endswith(domain))
                   for domain in domains)

    def _is_open(self, address: Address) -> bool:
        """An IPv6 address that stands for an IPv4 one is as open as that."""
        if isinstance(address, ipaddress.IPv6Address):
            inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
            if inner is None and address in _NAT64:
                inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
            if inner is not None:
                return self._is_open(inner)
        if any(address.version == network.version and address in network for network in self._networks):
            return True
        return address.is_global and not address.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
