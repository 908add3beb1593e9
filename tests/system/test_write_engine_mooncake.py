"""The write-engine contract on Mooncake, which needs the system's libibverbs1 (`make test-system` installs it where it may).

Elsewhere it is skipped with the reason, but never in continuous integration.
"""

from __future__ import annotations

import ctypes
import os

import pytest

from tests.support.write_engines import WriteEngineContract


@pytest.fixture(autouse=True, scope="module")
def libibverbs() -> None:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"Mooncake needs libibverbs1: {error}")


class TestMooncake(WriteEngineContract):
    engine = "mooncake"
    kept_per_restart = 1
