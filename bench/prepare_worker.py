"""SGLang's real prepare-for-decode, unpatched and patched in one process; no model, no kernel."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.mem_cache import allocation
from sglang.test.decode_prepare import (
    attach_spec_info,
    new_req,
    prefilled_batch,
    tree_cache,
)
from sglang.test.row_builders import BUILDERS, Shape, configured

COMMITTED, TOKENS = 32, 1 << 16
CALLS = 20
SHAPES = {"eagle": Shape("EAGLE3", 5, 4, 8), "dflash": Shape("DFLASH", 1, 1, 16)}
# What the series changes of the code that a step runs.
CHANGED = (
    "sglang.srt.mem_cache.page_geometry",
    "sglang.srt.mem_cache.allocation_sizing",
    "sglang.srt.mem_cache.allocation",
    "sglang.srt.speculative.dflash_info_v2",
    "sglang.srt.speculative.eagle_utils",
)


def loaded_beside(copy: Path) -> dict[str, ModuleType]:
    """The CHANGED modules of another copy, importing each other and, else, this process' SGLang."""
    made = {}
    with patch.dict(sys.modules):
        for name in CHANGED:
            file = Path(copy, *name.split(".")).with_suffix(".py")
            if file.is_file():
                spec = importlib.util.spec_from_file_location(name, file)
                made[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(made[name])
    return {name.rpartition(".")[2]: module for name, module in made.items()}


class Decode:
    """A batch that decodes at page 1, the default. The launch of the row write is left out: on a
    GPU it is asynchronous, here it would be the Triton interpreter."""

    def __init__(self, algorithm: str, batch_size: int) -> None:
        rows, self.allocator = BUILDERS["plain"](1024, TOKENS, batch_size)
        reqs = [new_req(f"r{i}", COMMITTED) for i in range(batch_size)]
        with patch.object(allocation, "write_cache_indices", lambda *args, **kwargs: None):
            self.batch = prefilled_batch(
                reqs, rows, self.allocator, tree_cache(rows, self.allocator)
            )
        attach_spec_info(self.batch)
        self.algorithm, self.taken = algorithm, []

    def prepare_of(self, modules: dict[str, ModuleType]):
        modules["allocation"].assign_req_to_token_pool_func = self._record
        if self.algorithm == "eagle":
            return modules["eagle_utils"].eagle_prepare_for_decode
        prepare = modules["dflash_info_v2"].DFlashDraftInputV2.prepare_for_decode
        return prepare.__get__(self.batch.spec_info)

    def _record(self, rows, table, starts, ends, locs, batch_size) -> None:
        self.taken.append(locs)

    def seconds(self, prepare, step: str) -> float:
        if step == "allocating":
            self._give_back()
        start = time.perf_counter()
        prepare(self.batch)
        return time.perf_counter() - start

    def _give_back(self) -> None:
        while self.taken:
            self.allocator.free(self.taken.pop())
        for req in self.batch.reqs:
            req.kv.kv_allocated_len = COMMITTED


@cache
def sides(patched: str) -> dict[str, dict[str, ModuleType]]:
    """Each loaded in the same way; the release twice, which tells what a ratio is worth."""
    own = str(Path(allocation.__file__).parents[3])
    return {
        n: loaded_beside(Path(c)) for n, c in (("base", own), ("again", own), ("patched", patched))
    }


def microseconds(patched: str, algorithm: str, batch_size: int, step: str, turns: int) -> dict:
    """The step of each side, a turn being the fastest of CALLS, and each side's over the unpatched
    one, turn by turn: medians. With the step "allocating", each takes every whole reserve."""
    with configured(SHAPES[algorithm], page_size=1):
        decode = Decode(algorithm, batch_size)
        prepares = [(n, decode.prepare_of(m)) for n, m in sides(patched).items()]
        times = {name: [] for name, _ in prepares}
        order = random.Random(0)
        for _ in range(turns + 1):
            order.shuffle(prepares)
            for name, prepare in prepares:
                times[name].append(min(decode.seconds(prepare, step) for _ in range(CALLS)))
    times = {name: taken[1:] for name, taken in times.items()}  # warm by then
    return {
        "us": {name: statistics.median(taken) * 1e6 for name, taken in times.items()},
        "ratio": {
            name: statistics.median(t / base for t, base in zip(taken, times["base"], strict=True))
            for name, taken in times.items()
        },
    }


def row_width(builder: str, shape: list, page_size: int, dcp_size: int, context_len: int) -> int:
    with configured(Shape(*shape), page_size=page_size, dcp_size=dcp_size):
        rows, _ = BUILDERS[builder](context_len, TOKENS, 1)
    return rows.req_to_token.shape[1]


def main() -> None:
    asks = {"microseconds": microseconds, "row_width": row_width}
    print(json.dumps({"answer": "ready"}), flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps({"answer": asks[what](*arguments)}), flush=True)


if __name__ == "__main__":
    main()
