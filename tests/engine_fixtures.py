"""Engines that several files of tests share: all of these run on one worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgeom import boot_tree, series, tree
from kvgeom.cpu_engine import Session, session


@pytest.fixture(scope="session")
def patched_copy() -> Iterator[Path]:
    """The folder of `kvgeom boot`'s copy of the installed SGLang with the whole stack."""
    with boot_tree.patched(series.load(), tree.find(None), lambda text: None) as copy:
        yield copy.package.parent


@pytest.fixture(scope="session")
def patched_engines(patched_copy) -> Iterator[Session]:
    """Engines of that copy. Their import is the longest part of a short run."""
    with session(patched_copy) as opened:
        yield opened


@pytest.fixture(scope="session")
def released_engines() -> Iterator[Session]:
    """Engines of the installed SGLang."""
    with session() as opened:
        yield opened
