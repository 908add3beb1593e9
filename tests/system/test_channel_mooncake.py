"""The channels' contract (tests/contract/test_cache_transfer.py) on Mooncake, which needs the system's libibverbs1."""

from __future__ import annotations

import pytest

from tests.contract import test_cache_transfer as contract

globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})


@pytest.fixture
def rig() -> contract.Rig:
    return contract.Rig({"channel": "rdma", "rdma": {"engine": "mooncake"}})
