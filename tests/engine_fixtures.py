"""Engines that several files of tests share: all of these run on one worker."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgeom import boot_tree, series, tree
from kvgeom.cpu_engine import EngineReport, EngineSpec, Session, session
from kvgeom.cpu_engine.libraries import Libraries, libraries


@pytest.fixture(scope="session")
def running() -> Iterator[Libraries]:
    """One import of the third-party libraries for a worker's engines and plans."""
    with libraries() as opened:
        yield opened


@pytest.fixture(scope="session")
def patched_copy() -> Iterator[Path]:
    """The folder of `kvgeom boot`'s copy of the installed SGLang with the whole stack."""
    with boot_tree.patched(series.load(), tree.find(None), lambda text: None) as copy:
        yield copy.package.parent


@pytest.fixture(scope="session")
def patched_engines(patched_copy, running) -> Iterator[Session]:
    """Engines of that copy. Their import is the longest part of a short run."""
    with session(patched_copy, running=running) as opened:
        yield opened


@pytest.fixture(scope="session")
def released_engines(tmp_path_factory, running) -> Iterator[Session]:
    """Engines of the installed SGLang. Nothing is left of them when they end."""
    scratch = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(scratch))
        opened = Session(None, "cpu", running)
    yield opened
    opened.close()
    assert list(scratch.iterdir()) == []


@functools.cache
def report_of(engines: Session, spec: EngineSpec) -> EngineReport:
    """The report of a spec; the same spec is run once."""
    return engines.run(spec, timeout=600)
