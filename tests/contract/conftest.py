"""Routers that a test starts by itself, before scripted workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.scripted_router import Front
from tests.support.scripted_workers import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    one = Stage()
    yield one
    one.close()


@pytest.fixture
def router(stage: Stage, tmp_path: Path) -> Iterator[Front]:
    """Not started yet; it ends in order, and complains of nothing."""
    one = Front(stage, tmp_path)
    yield one
    assert set(one.close()) <= {0}
    assert not one.complaints()
