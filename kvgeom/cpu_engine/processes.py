"""An engine's processes: what they take, and their end. SGLang brings psutil."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

END_SECONDS = 10.0  # for killed processes to go


def end(pid: int) -> None:
    """Kill the engine and every process of its session, and wait for the engine."""
    import psutil

    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid).children(recursive=True)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + END_SECONDS
    while not all(map(_is_gone, family)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in family:  # SGLang puts the pid into the names of its segments
        for segment in Path("/dev/shm").glob(f"sgl_shm_*_{process.pid}_*"):
            segment.unlink(missing_ok=True)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _is_gone(process) -> bool:
    """Also where it waits to be reaped, by whoever has become its parent."""
    import psutil

    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def memory_mb(pid: int, forked: bool) -> int:
    """Proportional set size of the parent, its engine `pid` and the ranks, in MiB.

    Where they were forked from the libraries' process, with that.
    """
    import psutil

    total = 0
    try:
        engine = psutil.Process(pid)
        family = [psutil.Process(), engine, *engine.children(recursive=True)]
        if forked:
            family.append(psutil.Process().parent())
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:")
    return total >> 10
