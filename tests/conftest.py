"""How pytest-xdist spreads tests over processes (`scripts/test`): a file stays together, and deployments run one by one."""

from __future__ import annotations

from typing import Any

import pytest

TOGETHER = "deployment"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # what is not spread needs no group
        return
    for item in items:
        if item.get_closest_marker(TOGETHER):
            item.add_marker(pytest.mark.xdist_group(TOGETHER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadgroup`: one unit of all deployments, else one of each file, so that a module's fixtures are made once."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    scheduler = LoadGroupScheduling(config, log)
    group_of = scheduler._split_scope  # a test's group, or its whole name
    scheduler._split_scope = lambda name: group_of(name).partition("::")[0]
    return scheduler
