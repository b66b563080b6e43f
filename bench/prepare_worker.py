"""One side of bench/prepare.py: times SGLang's real prepare-for-decode, no model, no kernel."""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from unittest.mock import patch

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.mem_cache import allocation
from sglang.srt.speculative import eagle_utils
from sglang.test.decode_prepare import (
    attach_spec_info,
    new_req,
    prefilled_batch,
    tree_cache,
)
from sglang.test.row_builders import BUILDERS, Shape, configured

COMMITTED, TOKENS = 32, 1 << 16
REPEATS = int(sys.argv[1])
SHAPES = {"eagle": Shape("EAGLE3", 5, 4, 8), "dflash": Shape("DFLASH", 1, 1, 16)}


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
        self.taken = []
        if algorithm == "eagle":
            self.prepare = eagle_utils.eagle_prepare_for_decode
        else:
            self.prepare = self.batch.spec_info.prepare_for_decode

    def record(self, rows, table, starts, ends, locs, batch_size) -> None:
        self.taken.append(locs)

    def microseconds(self, allocates: bool) -> float:
        """The fastest of REPEATS calls; with `allocates`, each takes every whole reserve."""
        times = []
        with patch.object(allocation, "assign_req_to_token_pool_func", self.record):
            for _ in range(REPEATS):
                if allocates:
                    self._give_back()
                start = time.perf_counter()
                self.prepare(self.batch)
                times.append(time.perf_counter() - start)
        return min(times) * 1e6

    def _give_back(self) -> None:
        while self.taken:
            self.allocator.free(self.taken.pop())
        for req in self.batch.reqs:
            req.kv.kv_allocated_len = COMMITTED


@cache
def decode(algorithm: str, batch_size: int) -> Decode:
    return Decode(algorithm, batch_size)


def microseconds(algorithm: str, batch_size: int, step: str) -> float:
    with configured(SHAPES[algorithm], page_size=1):
        return decode(algorithm, batch_size).microseconds(step == "allocating")


def row_width(builder: str, shape: list, page_size: int, dcp_size: int, context_len: int) -> int:
    with configured(Shape(*shape), page_size=page_size, dcp_size=dcp_size):
        rows, _ = BUILDERS[builder](context_len, TOKENS, 1)
    return rows.req_to_token.shape[1]


def main() -> None:
    asks = {"microseconds": microseconds, "row_width": row_width}
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps({"answer": asks[what](*arguments)}), flush=True)


if __name__ == "__main__":
    main()
