"""The channels' contract (tests/contract/test_cache_transfer.py) on Mooncake, which needs the system's libibverbs1."""

from __future__ import annotations

import pytest

from tests.contract.test_cache_transfer import *  # noqa: F403 - the tests themselves
from tests.contract.test_cache_transfer import Rig


@pytest.fixture(name="rig")
def mooncake() -> Rig:
    return Rig({"channel": "rdma", "rdma": {"engine": "mooncake"}})
