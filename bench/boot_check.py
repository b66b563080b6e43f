"""What the series costs a rank at boot, on SGLang's real configurator and pools, on CPU.

    make bench

Two processes, one on the unpatched release and one on a patched copy, configure the pools of the
same draft runner in turn; the medians and their ratio are over the pairs. On the patched side the
assertion is then timed alone, and the tensor operations that it dispatches are counted.
"""

from __future__ import annotations

import statistics

from pair import pair

PAIRS = 40
DCP, PAGE, SIZE = 8, 64, 4096


def main() -> None:
    with pair("worker.py", DCP, PAGE, SIZE) as workers:
        for worker in workers.values():
            worker.ask("configure")
        pairs = [{n: w.ask("configure") for n, w in workers.items()} for _ in range(PAIRS)]
        check_us, operations = workers["patched"].ask("check")
    base, patched = (statistics.median(p[n] for p in pairs) for n in ("base", "patched"))
    ratio = statistics.median(p["patched"] / p["base"] for p in pairs)
    print(f"draft pools, dcp {DCP}, page {PAGE}, {SIZE} tokens a rank, {PAIRS} pairs, medians")
    print(f"  configure()   unpatched {base:9.0f} us   patched {patched:9.0f} us   x {ratio:.3f}")
    print(f"  assertion     {check_us:.1f} us a rank, {operations} tensor operations")


if __name__ == "__main__":
    main()
