"""How long `kvgeom apply` and `kvgeom revert` take on a copy of the installed SGLang."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pair import private_copies

RUNS = 5


def seconds(verb: str, tree: Path) -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "kvgeom.cli", verb, "--tree", str(tree)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = private_copies(Path(folder))["patched"]
        taken = {"revert": [], "apply": []}
        for _ in range(RUNS):
            for verb, found in taken.items():
                found.append(seconds(verb, tree))
    for verb, found in taken.items():
        low, high = min(found), max(found)
        median = statistics.median(found)
        print(f"{verb:6} median {median:.1f} s of {RUNS}, from {low:.1f} to {high:.1f}")


if __name__ == "__main__":
    main()
