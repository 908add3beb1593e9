"""The write-engine contract on NIXL, over TCP and on one host."""

from __future__ import annotations

from tests.support.write_engines import WriteEngineContract


class TestNixl(WriteEngineContract):
    engine = "nixl"
