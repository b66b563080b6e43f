"""Which worker runs which tests, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

ENGINE = {
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if "pytestmark = pytest.mark.engine" in path.read_text()
}

IN_TREE = ("test_in_tree.py", "test_releases_in_tree.py")


class FileByFile(LoadScopeScheduling):
    """A file's tests stay on one worker. So do all engines, of which one runs at a time, and the
    in-tree tests, which are forked from one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0].rpartition("/")[2]
        return "engine" if file in ENGINE else "in-tree" if file in IN_TREE else file


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> FileByFile:
    return FileByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: the short ones then fill what is left of two workers."""
    items.sort(key=lambda item: (item.path.name not in ENGINE, item.path.name not in IN_TREE))
