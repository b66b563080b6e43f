"""What the series costs a rank at boot, on SGLang's real configurator and pools, on CPU.

    make bench

Two processes, one on the unpatched release and one on a patched copy, configure the pools of the
same draft runner in turn; the medians and their ratio are over the pairs. On the patched side the
assertion is then timed alone, and the tensor operations that it dispatches are counted.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kvgeom import actions, series, tree

PAIRS = 40
DCP, PAGE, SIZE = 8, 64, 4096


def private_copies(root: Path) -> dict[str, Path]:
    """Copies of the installed SGLang: `base` as released, `patched` with the series. Both get the
    pool builders that the series' own tests use."""
    stack, installed = series.load(), tree.find(None)
    families = stack.root / "python/sglang/test/kv_cache_families.py"
    copies = {}
    for name in ("base", "patched"):
        copies[name] = root / name
        copies[name].mkdir()
        subprocess.run(
            ["cp", "-al", str(installed.package), str(copies[name] / "sglang")], check=True
        )
        for info in installed.package.parent.glob("sglang-*.dist-info"):
            shutil.copytree(info, copies[name] / info.name)
    shutil.copy(families, copies["base"] / "sglang/test/kv_cache_families.py")
    actions.apply(
        stack, tree.find(copies["patched"]), dry_run=False, wait_s=5, say=lambda text: None
    )
    return copies


class Worker:
    """A process on one copy; every `ask` is one measurement inside it."""

    def __init__(self, copy: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("worker.py"))]
        self.process = subprocess.Popen(
            [*command, str(DCP), str(PAGE), str(SIZE)],
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
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)["answer"]
        sys.exit(f"bench: the worker ended while it was asked for {what!r}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("starting SGLang twice (about 30 s)", flush=True)
        workers = {n: Worker(c) for n, c in private_copies(Path(folder)).items()}
        for worker in workers.values():
            worker.ask("configure")
        pairs = [{n: w.ask("configure") for n, w in workers.items()} for _ in range(PAIRS)]
        check_us, operations = workers["patched"].ask("check")
        for worker in workers.values():
            worker.close()
    base, patched = (statistics.median(p[n] for p in pairs) for n in ("base", "patched"))
    ratio = statistics.median(p["patched"] / p["base"] for p in pairs)
    print(f"draft pools, dcp {DCP}, page {PAGE}, {SIZE} tokens a rank, {PAIRS} pairs, medians")
    print(f"  configure()   unpatched {base:9.0f} us   patched {patched:9.0f} us   x {ratio:.3f}")
    print(f"  assertion     {check_us:.1f} us a rank, {operations} tensor operations")


if __name__ == "__main__":
    main()
