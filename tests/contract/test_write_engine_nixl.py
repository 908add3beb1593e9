"""The write-engine contract on NIXL, over TCP and on one host."""

from __future__ import annotations

from tests.support.write_engines import Start, WriteEngineContract


class TestNixl(WriteEngineContract):
    engine = "nixl"

    def test_it_listens_on_the_configured_interface_only(self, start: Start) -> None:
        assert start("a").listens_at() == {"0100007F"}
