"""The environment that UCX and Mooncake read as they are loaded. Knows no engine; what the user has set stays."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from slipstream.errors import ConfigError

RDMA_DEVICES = Path("/sys/class/infiniband")


def set_environment(environ: MutableMapping[str, str], host: str, devices: Path = RDMA_DEVICES) -> None:
    """Tune the libraries for TCP, and bind them to the interface that has the address `host` (a wildcard: to none).

    A worker's main calls it with os.environ before it chooses an engine. Raises ConfigError.
    """
    check_transports(environ)
    for name, value in settings(host, devices).items():
        environ.setdefault(name, value)


def settings(host: str, devices: Path = RDMA_DEVICES) -> dict[str, str]:
    """The variables and their values. Raises ConfigError if no interface here has the address."""
    result = {
        # Without these every 8 KiB is a segment of its own: a read is three times slower, a write a sixth.
        "UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m", "UCX_TCP_SNDBUF": "4m", "UCX_TCP_RCVBUF": "4m",
        "UCX_LOG_FILE": "stderr",  # stdout is for what a worker announces
        "UCX_HANDLE_ERRORS": "none",  # its signal handlers are not ours
        "UCX_VFS_ENABLE": "n",  # no thread that watches the file system
        "NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR",  # what fails is raised
    }
    ports = [f"{device.name}:{port.name}" for device in sorted(devices.glob("*")) for port in sorted(device.glob("ports/*"))]
    if not ports:
        # Where ibverbs-providers is installed, unloading what this module loads ends the process by SIGSEGV.
        result["UCX_MODULES"] = "^ib"
    address = _resolved(host)
    if not address.is_unspecified:
        result["UCX_NET_DEVICES"] = ",".join([interface(address), *ports])
        result["MC_TCP_BIND_ADDRESS"] = str(address)  # what Mooncake tells its peers
    return result


def check_transports(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a UCX_TLS without tcp: UCX notices the end of a peer by it."""
    chosen = environ.get("UCX_TLS", "all")
    names = {name.strip() for name in chosen.removeprefix("^").split(",")}
    if ("tcp" in names) if chosen.startswith("^") else not names & {"all", "tcp"}:
        raise ConfigError(f"UCX_TLS={chosen} leaves out tcp, without which no lost peer is noticed; add it", field="UCX_TLS")


def _resolved(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{host} is no address of this machine: {error}", field="listen") from error
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def interface(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """The name of the network interface with this address. Raises ConfigError."""
    found = list(_interfaces())
    for name, one in found:
        if one == address or (one.is_loopback and address.is_loopback):
            return name
    raise ConfigError(f"no network interface has the address {address}; there are "
                      f"{', '.join(f'{name} {one}' for name, one in found)}", field="listen")


class _Ifaddrs(ctypes.Structure):
    _fields_ = (("next", ctypes.c_void_p), ("name", ctypes.c_char_p), ("flags", ctypes.c_uint), ("address", ctypes.c_void_p))


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """By getifaddrs(3): the ioctls know only the first address of an interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(head)):
        raise ConfigError(f"cannot list the network interfaces: errno {ctypes.get_errno()}")
    try:
        at = head.value
        while at:
            entry = _Ifaddrs.from_address(at)
            if entry.address:
                family = ctypes.c_ushort.from_address(entry.address).value
                if family == socket.AF_INET:
                    yield entry.name.decode(), ipaddress.IPv4Address(ctypes.string_at(entry.address + 4, 4))
                elif family == socket.AF_INET6:
                    yield entry.name.decode(), ipaddress.IPv6Address(ctypes.string_at(entry.address + 8, 16))
            at = entry.next
    finally:
        libc.freeifaddrs(head)
