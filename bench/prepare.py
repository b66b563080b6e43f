"""What the series costs a decode step and a req_to_token row, patched against unpatched, paired.

    make bench

Unpatched and patched code of the real prepare stand in one process and take turns on one batch,
each turn the fastest of some calls: two processes differ by percents on the same code. A "steady"
step finds its slots allocated. An "allocating" one takes every request's whole reserve, which is
where the row guard stands; it leaves out the launch of the row write, so it is the shortest time
that the guard can be compared with. About three minutes.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

from pair import Worker, copies, started

PROCESSES, SIDES = 6, ("base", "patched")
TURNS = {1: 150, 32: 40, 256: 8}  # of each batch size, in a process
LIMIT = 1.02
CONTEXT_LEN, REQUESTS = 131072, 256
ROWS = (  # builder, (algorithm, steps, topk, draft tokens), page, dcp
    ("plain", (), 1, 1),
    ("plain", (), 64, 1),
    ("plain", ("EAGLE", 3, 1, 4), 1, 1),
    ("plain", ("EAGLE3", 5, 4, 8), 1, 1),
    ("plain", ("EAGLE3", 5, 4, 8), 64, 1),
    ("plain", ("NGRAM", 1, 10, 12), 1, 1),
    ("plain", ("DFLASH", 1, 1, 16), 1, 1),
    ("plain", ("DSPARK", 1, 1, 8), 64, 8),
    ("unified mamba", ("DSPARK", 1, 1, 8), 64, 1),
    ("unified mamba", ("DSPARK", 1, 1, 8), 64, 8),
    ("unified mamba swa", ("DSPARK", 1, 1, 8), 64, 1),
    ("swa", ("EAGLE3", 5, 4, 8), 64, 8),
)


def print_rows(workers: dict[str, Worker]) -> None:
    """Bytes that the table of a server with REQUESTS requests gains; one row of it is padding."""
    print(f"req_to_token columns past a context of {CONTEXT_LEN}; bytes for {REQUESTS} requests")
    for builder, shape, page, dcp in ROWS:
        question = json.dumps(["row_width", builder, shape, page, dcp, CONTEXT_LEN])
        base, patched = (workers[n].ask(question) - CONTEXT_LEN for n in SIDES)
        kib = (patched - base) * (REQUESTS + 1) * 4 / 1024
        name = f"{shape[0]} {'/'.join(map(str, shape[1:]))}" if shape else "no speculation"
        print(
            f"  {builder:17} {name:15} page {page:3} dcp {dcp}   unpatched {base:5}"
            f"   patched {patched:5}   {kib:+9.1f} KiB"
        )


def time_cases(worker: Worker, patched: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Case -> what one process timed."""
    out = {}
    cases = itertools.product(("eagle", "dflash"), TURNS, ("steady", "allocating"))
    for algorithm, batch_size, step in cases:
        question = ["microseconds", str(patched), algorithm, batch_size, step, TURNS[batch_size]]
        out[f"{algorithm:6} batch {batch_size:3} {step:10}"] = worker.ask(json.dumps(question))
    return out


def print_times(found: list[dict[str, dict[str, dict[str, float]]]]) -> None:
    """`found`: what each process timed."""
    print(f"prepare for decode, medians of {PROCESSES} processes; in brackets, the lowest and")
    print("highest of them, and the unpatched release against itself")
    over = []
    for case in found[0]:
        base, patched = (statistics.median(t[case]["us"][n] for t in found) for n in SIDES)
        again, ratios = (sorted(t[case]["ratio"][n] for t in found) for n in ("again", "patched"))
        ratio = statistics.median(ratios)
        if ratio > LIMIT:
            over.append(case)
        print(
            f"  {case} unpatched {base:6.1f} us  patched {patched:6.1f} us  x {ratio:.3f}"
            f"  ({ratios[0]:.3f} to {ratios[-1]:.3f}; {again[0]:.3f} to {again[-1]:.3f})"
        )
    print(f"over x {LIMIT}: {'; '.join(over) or 'none'}")


def main() -> None:
    with copies() as made:
        print("starting SGLang twice (about 30 s)", flush=True)
        with started(made, "prepare_worker.py") as workers:
            print_rows(workers)
        found = []
        for number in range(PROCESSES):
            # Fresh processes: where code and data come to lie moves a ratio.
            print(f"timing in process {number + 1} of {PROCESSES}", flush=True)
            with started({"base": made["base"]}, "prepare_worker.py") as workers:
                found.append(time_cases(workers["base"], made["patched"]))
    print_times(found)


if __name__ == "__main__":
    main()
