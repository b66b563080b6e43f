"""One side of a benchmark: answers questions from stdin on the SGLang that it imports."""

from __future__ import annotations

import json
import statistics
import sys
import time

from sglang.test.test_utils import maybe_stub_sgl_kernel, published_topology

maybe_stub_sgl_kernel()

from sglang.test.draft_configurator import TINY_LLAMA, draft_configurator, write_config
from sglang.test.kv_cache_families import FAMILIES
from torch.utils._python_dispatch import TorchDispatchMode

DCP, PAGE, SIZE = map(int, sys.argv[1:])


class CountOperations(TorchDispatchMode):
    """Counts every tensor operation, allocations included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def microseconds(call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def check(configurator, allocator) -> tuple[float, int]:
    """The assertion alone: median microseconds of a call, tensor operations of one call."""
    from sglang.srt.configurator import page_geometry_check

    pool = configurator.configure(pre_model_load_memory=1).token_to_kv_pool

    def call():
        page_geometry_check.check_page_geometry(
            allocator=allocator, pool=pool, is_draft_worker=True
        )

    call()
    with CountOperations() as counted:
        call()
    return statistics.median(microseconds(call) for _ in range(1000)), counted.count


def main() -> None:
    paged = next(f for f in FAMILIES if f.name == "paged")
    folder = write_config(TINY_LLAMA)
    with published_topology(device="cpu", tp_size=DCP, dcp_size=DCP, page_size=PAGE):
        allocator, _ = paged.build(SIZE, PAGE, DCP)
        configurator = draft_configurator(allocator, model_path=folder, max_total_num_tokens=SIZE)
        asks = {
            "configure": lambda: microseconds(
                lambda: configurator.configure(pre_model_load_memory=1)
            ),
            "check": lambda: check(configurator, allocator),
        }
        print(json.dumps({"answer": "ready"}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"answer": asks[line.strip()]()}), flush=True)


if __name__ == "__main__":
    main()
