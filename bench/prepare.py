"""What the series costs a decode step and a req_to_token row, patched against unpatched, paired.

    make bench

Two processes time the same real prepare in turn, each turn the fastest of some calls; medians and
their ratio are over the pairs. A "steady" step finds its slots allocated. An "allocating" one takes
every request's whole reserve, which is where the row guard stands; it leaves out the launch of the
row write, so it is the shortest time that the guard can be compared with.
"""

from __future__ import annotations

import itertools
import json
import statistics

from pair import Worker, pair

ROUNDS, PAIRS, REPEATS = 3, 40, 60
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
        base, patched = (workers[n].ask(question) - CONTEXT_LEN for n in ("base", "patched"))
        kib = (patched - base) * (REQUESTS + 1) * 4 / 1024
        name = f"{shape[0]} {'/'.join(map(str, shape[1:]))}" if shape else "no speculation"
        print(
            f"  {builder:17} {name:15} page {page:3} dcp {dcp}   unpatched {base:5}"
            f"   patched {patched:5}   {kib:+9.1f} KiB"
        )


def time_cases(workers: dict[str, Worker]) -> dict[str, list[dict[str, float]]]:
    """Case -> pairs of microseconds. The side that goes first alternates."""
    out = {}
    cases = itertools.product(("eagle", "dflash"), (1, 32, 256), ("steady", "allocating"))
    for algorithm, batch_size, step in cases:
        question = json.dumps(["microseconds", algorithm, batch_size, step])
        pairs = []
        for number in range(PAIRS + 1):
            order = list(workers.items())[:: 1 if number % 2 else -1]
            pairs.append({name: worker.ask(question) for name, worker in order})
        out[f"{algorithm:6} batch {batch_size:3} {step:10}"] = pairs[1:]
    return out


def print_times(rounds: list[dict[str, list[dict[str, float]]]]) -> list[str]:
    """The cases over LIMIT."""
    over = []
    print(
        f"prepare for decode, {ROUNDS} x {PAIRS} pairs, medians of the fastest of {REPEATS} calls"
    )
    for case in rounds[0]:
        pairs = [pair for found in rounds for pair in found[case]]
        base, patched = (statistics.median(p[n] for p in pairs) for n in ("base", "patched"))
        ratio = statistics.median(p["patched"] / p["base"] for p in pairs)
        if ratio > LIMIT:
            over.append(case)
        print(f"  {case}  unpatched {base:7.1f} us   patched {patched:7.1f} us   x {ratio:.3f}")
    return over


def main() -> None:
    rounds = []
    for number in range(ROUNDS):
        # Fresh processes each round: where their code comes to lie moves a ratio by some percent.
        with pair("prepare_worker.py", REPEATS) as workers:
            if number == 0:
                print_rows(workers)
            rounds.append(time_cases(workers))
    over = print_times(rounds)
    print(f"over x {LIMIT}: {'; '.join(over) or 'none'}")


if __name__ == "__main__":
    main()
