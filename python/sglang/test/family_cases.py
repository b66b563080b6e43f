"""Every allocator family with its pool at each DCP size, for the boot checks."""

import contextlib
import itertools
from typing import Iterator

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.test.kv_cache_families import FAMILIES, Family, topology
from sglang.test.test_utils import CustomTestCase

PAGES = 8
DCP_SIZES = (1, 2, 8)
# Neither of the two left out is built under DCP.
CASES = [
    (fam, page_size, dcp_size)
    for fam, dcp_size in itertools.product(FAMILIES, DCP_SIZES)
    for page_size in fam.page_sizes
    if fam.name not in ("token", "page_interleave") or dcp_size == 1
]


class FamilyTestCase(CustomTestCase):
    @contextlib.contextmanager
    def case(
        self, fam: Family, page_size: int, dcp_size: int
    ) -> Iterator[tuple[BaseTokenToKVPoolAllocator, KVCache]]:
        """PAGES pages of a family, in a subtest of its own."""
        with (
            self.subTest(fam.name, page=page_size, dcp=dcp_size),
            topology(dcp_size, page_size),
        ):
            yield fam.build(PAGES * page_size, page_size, dcp_size)
