"""Which write engine is taken, what is said if there is none, and the environment that the libraries find."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from pathlib import Path

import pytest

from cache_transfer import spans
from cache_transfer.channels import engines
from cache_transfer.channels.engines import choose_engine
from cache_transfer.channels.engines.base import Address, parse
from cache_transfer.channels.engines.environment import interface, set_environment
from cache_transfer.paths import open_paths
from slipstream import config_rules
from slipstream.config import FaultsConfig, TransferConfig
from slipstream.errors import ConfigError, IncompatibleError, TransferError


class Plain:
    def __init__(self, *, host: str, process: str, lands: bool) -> None:
        self.name = f"{host} {process}"


def missing(*, host: str, process: str, lands: bool) -> Plain:
    raise ImportError("libsomething.so.1: no such file")


def broken(*, host: str, process: str, lands: bool) -> Plain:
    raise TransferError("no backend")


def test_auto_takes_the_first_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "KNOWN", {"a": missing, "b": broken, "c": Plain, "d": missing})
    assert choose_engine("auto", host="h", process="p").name == "h p"


@pytest.mark.parametrize("name", ["auto", "a"])
def test_none_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(engines, "KNOWN", {"a": missing})
    with pytest.raises(ConfigError, match=r"a: libsomething.*slipstream\[rdma\].*mooncake-transfer-engine-rocm") as caught:
        choose_engine(name, host="h", process="p")
    assert caught.value.field == "transfer.rdma.engine"


def test_the_configuration_knows_the_same_names() -> None:
    assert ("auto", *engines.KNOWN) == config_rules.NAMES["transfer.rdma.engine"]


def test_faults_that_are_on_are_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    for faults in (FaultsConfig(seed=3), FaultsConfig(seed=3, drop=0.5, stall_at_bytes=7)):
        open_paths(TransferConfig(channel="grpc", faults=faults), spans.EMPTY, process="p")
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert told[0].getMessage().endswith(": drop=0.5, stall_at_bytes=7")


def test_importing_the_engines_loads_no_library() -> None:
    code = ("import sys, cache_transfer.channels.engines\n"
            "print(*[n for n in sys.modules if n.partition('.')[0] in ('nixl_cu12', 'mooncake', 'torch')])")
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split() == []


def test_the_two_sides_need_the_same_engine() -> None:
    address = Address(engine="nixl", process="p0/1", incarnation="i", probe=1, contents=b"").packed()
    assert parse(address, "nixl").process == "p0/1"
    with pytest.raises(IncompatibleError, match="p0/1 writes with nixl, this process with mooncake"):
        parse(address, "mooncake")


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    environ = {"UCX_NET_DEVICES": "eth7", "UCX_TLS": "tcp,self"}
    set_environment(environ, "127.0.0.1", tmp_path)
    assert environ["UCX_NET_DEVICES"] == "eth7"
    assert environ["UCX_TCP_TX_SEG_SIZE"] == "1m"
    assert environ["UCX_MODULES"] == "^ib"


def test_it_binds_the_interface_and_the_adapters(tmp_path: Path) -> None:
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/1", "mlx5_1/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    environ: dict[str, str] = {}
    set_environment(environ, "127.0.0.1", tmp_path)
    assert environ["UCX_NET_DEVICES"] == "lo,mlx5_0:1,mlx5_1:1,mlx5_1:2"
    assert "UCX_MODULES" not in environ
    everywhere: dict[str, str] = {}
    set_environment(everywhere, "0.0.0.0", tmp_path)
    assert "UCX_NET_DEVICES" not in everywhere


@pytest.mark.parametrize("transports", ["posix,cma,self", "rc", "^tcp", "^sm,tcp"])
def test_tcp_must_stay(transports: str) -> None:
    with pytest.raises(ConfigError, match="leaves out tcp"):
        set_environment({"UCX_TLS": transports}, "127.0.0.1")


@pytest.mark.parametrize("transports", ["tcp", "all", "^cma", "rc,tcp,self"])
def test_other_choices_are_the_user_s(transports: str) -> None:
    set_environment({"UCX_TLS": transports}, "127.0.0.1")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no network interface has the address 192\.0\.2\.7; there are lo 127\.0\.0\.1"):
        set_environment({}, "192.0.2.7")
    assert interface(ipaddress.ip_address("127.8.8.8")) == "lo"
