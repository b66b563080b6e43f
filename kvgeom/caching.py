"""What kvgeom keeps between runs: folders below $XDG_CACHE_HOME/kvgeom, one writer at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kvgeom.errors import KvgeomError

TEMPORARY = ".new-"  # begins the name of a folder that is not in place yet


def folder(name: str) -> Path:
    """$XDG_CACHE_HOME/kvgeom/`name`, or ~/.cache/kvgeom/`name`; it may not be there."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvgeom" / name


@contextmanager
def writing(
    base: Path, *, wait_s: float, on_wait: Callable[[], None], refusal: KvgeomError
) -> Iterator[None]:
    """Hold `base`, made where it is missing and without what a killed writer left.

    `refusal` is raised when another process still holds it after `wait_s` seconds.
    """
    base.mkdir(parents=True, exist_ok=True)
    lock = FileLock(base / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        try:
            lock.acquire(timeout=wait_s)
        except Timeout:
            raise refusal from None
    try:
        for rest in base.glob(f"{TEMPORARY}*"):
            shutil.rmtree(rest, ignore_errors=True)
        yield
    finally:
        lock.release()


def hold(folder: Path, mode: int = fcntl.LOCK_SH) -> int:
    """A descriptor of the folder, locked until it is closed; BlockingIOError where that fails."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle
