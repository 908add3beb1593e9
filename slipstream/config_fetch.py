"""The section of the configuration that says what routers fetch from elsewhere; knows no connection."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from slipstream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """[router.fetch]: pictures and frames of videos that requests name by http(s) URL (docs/security.md); off by default."""

    domains: tuple[str, ...] = ()
    """Hosts that pictures may come from: `example.com`, `.example.com` for all below it, or `*`; redirects included. Empty:
    nothing is fetched."""
    networks: tuple[str, ...] = ()
    """Networks beside the public internet that those hosts may be in: `10.1.0.0/16`. Other private, loopback, link-local and
    reserved addresses are refused, whatever name leads there."""
    max_bytes: int = 20 << 20
    """Longest file."""
    seconds: float = 10.0
    """Longest wait for a picture, redirects included."""
    total_seconds: float = 30.0
    """Longest wait for all pictures and frames of a request, their turns included."""
    max_redirects: int = 3
    """Redirects on the way to a picture."""
    concurrent: int = 32
    """Pictures that a router fetches at once; others wait."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a network that is none."""
        for network in self.networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ConfigError(f"router.fetch.networks: {error}; write it as 10.1.0.0/16",
                                  field="router.fetch.networks") from error
