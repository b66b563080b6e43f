"""Every allocator family with its pool at each DCP size, for the boot checks."""

import contextlib
import functools
import itertools
from typing import Iterator

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.test.kv_cache_families import FAMILIES, Family, drain, topology
from sglang.test.test_utils import CustomTestCase

PAGES = 8
DCP_SIZES = (1, 2, 8)
# By page and DCP size, as one server after the other. Neither of the two families
# left out is built under DCP.
CASES = sorted(
    (
        (fam, page_size, dcp_size)
        for fam, dcp_size in itertools.product(FAMILIES, DCP_SIZES)
        for page_size in fam.page_sizes
        if fam.name not in ("token", "page_interleave") or dcp_size == 1
    ),
    key=lambda case: case[1:],
)


@functools.cache
def reach_of(fam: Family, page_size: int, dcp_size: int) -> int:
    """One past the last loc of the case, which is published. Found once."""
    allocator, _ = fam.build(PAGES * page_size, page_size, dcp_size)
    return max(drain(allocator)) + 1


class FamilyTestCase(CustomTestCase):
    def setUp(self):
        super().setUp()
        self.server, self.pages = contextlib.ExitStack(), None
        self.addCleanup(self.server.close)

    def publish(self, page_size: int, dcp_size: int) -> None:
        """A server with these pages, unless it is the one that is published."""
        if self.pages != (page_size, dcp_size):
            self.server.close()
            self.server.enter_context(topology(dcp_size, page_size))
            self.pages = page_size, dcp_size

    @contextlib.contextmanager
    def case(
        self, fam: Family, page_size: int, dcp_size: int
    ) -> Iterator[tuple[BaseTokenToKVPoolAllocator, KVCache]]:
        """PAGES pages of a family, in a subtest of its own."""
        with self.subTest(fam.name, page=page_size, dcp=dcp_size):
            self.publish(page_size, dcp_size)
            yield fam.build(PAGES * page_size, page_size, dcp_size)
