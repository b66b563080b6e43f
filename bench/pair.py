"""Two processes to compare: one on the unpatched release, one with the series applied."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgeom import actions, series, tree


def private_copies(root: Path) -> dict[str, Path]:
    """Copies of the installed SGLang: `base` as released, `patched` with the series. Both get what
    the series' own tests are built from."""
    stack, installed = series.load(), tree.find(None)
    copies = {}
    for name in ("base", "patched"):
        copies[name] = root / name
        copies[name].mkdir()
        subprocess.run(
            ["cp", "-al", str(installed.package), str(copies[name] / "sglang")], check=True
        )
        for info in installed.package.parent.glob("sglang-*.dist-info"):
            shutil.copytree(info, copies[name] / info.name)
    for fixture in (stack.root / "python/sglang/test").glob("*.py"):
        shutil.copy(fixture, copies["base"] / "sglang/test")
    actions.apply(
        stack, tree.find(copies["patched"]), dry_run=False, wait_s=5, say=lambda text: None
    )
    return copies


class Worker:
    """A process on one copy; every `ask` is one measurement inside it."""

    def __init__(self, copy: Path, script: str, *arguments: int) -> None:
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script))]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env=env,
            cwd=copy,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, what: str):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.answer(what)

    def answer(self, what: str):
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)["answer"]
        sys.exit(f"bench: the worker ended while it was asked for {what!r}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def copies() -> Iterator[dict[str, Path]]:
    """`private_copies`, for as long as they are used."""
    with tempfile.TemporaryDirectory() as folder:
        yield private_copies(Path(folder))


@contextmanager
def started(copies: dict[str, Path], script: str, *arguments: int) -> Iterator[dict[str, Worker]]:
    """`script` in a process on each copy; it says that it is ready before it is asked."""
    workers = {name: Worker(copy, script, *arguments) for name, copy in copies.items()}
    for worker in workers.values():
        worker.answer("ready")
        # Both on one core: they run in turn, and no core is busier for one of them.
        os.sched_setaffinity(worker.process.pid, {max(os.sched_getaffinity(0))})
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


@contextmanager
def pair(script: str, *arguments: int) -> Iterator[dict[str, Worker]]:
    """`script` on the unpatched release ("base") and on a patched copy ("patched")."""
    print("starting SGLang twice (about 30 s)", flush=True)
    with copies() as made, started(made, script, *arguments) as workers:
        yield workers
