"""`allocator.loc_space` against the locs that the allocator really hands out."""

import itertools
import unittest

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.mem_cache.page_geometry import LocSpace
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_cache_families import FAMILIES, drain, family
from sglang.test.kv_pools import mha_pool

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

PAGES = (8, 11)
DCP_SIZES = (1, 2, 8)


def cases():
    for fam, pages, dcp_size in itertools.product(FAMILIES, PAGES, DCP_SIZES):
        for page_size in fam.page_sizes:
            # The builder picks the token allocator only where nothing widens.
            if fam.name != "token" or dcp_size == 1:
                yield fam, pages * page_size, page_size, dcp_size


class TestLocSpaceOfEveryFamily(CustomTestCase):
    def test_drained_locs_are_exactly_the_loc_space(self):
        for fam, size, page_size, dcp_size in cases():
            with (
                self.subTest(fam.name, size=size, page=page_size, dcp=dcp_size),
                get_parallel().override(attn_dcp_size=dcp_size),
            ):
                allocator, _ = fam.build(size, page_size, dcp_size)
                space = allocator.loc_space
                locs = drain(allocator)
                self.assertEqual(locs, set(range(space.first, space.reach)))
                self.assertEqual(len(locs), space.size)

    def test_page_is_the_built_allocators_own(self):
        for fam, size, page_size, dcp_size in cases():
            with (
                self.subTest(fam.name, page=page_size, dcp=dcp_size),
                get_parallel().override(attn_dcp_size=dcp_size),
            ):
                allocator, _ = fam.build(size, page_size, dcp_size)
                widened = page_size * (dcp_size if fam.widens else 1)
                self.assertEqual(allocator.loc_space.page_size, allocator.page_size)
                self.assertEqual(allocator.loc_space.page_size, widened)

    def test_a_size_between_pages_does_not_extend_the_reach(self):
        paged = family("paged")
        for tail in range(16):
            allocator, _ = paged.build(64 + tail, 16, 1)
            self.assertEqual(max(drain(allocator)) + 1, allocator.loc_space.reach)

    def test_resize_moves_the_loc_space(self):
        paged = family("paged")
        allocator, _ = paged.build(64, 16, 1)

        class Config:
            max_total_num_tokens = 32

        allocator.resize(Config)
        self.assertEqual(max(drain(allocator)) + 1, allocator.loc_space.reach)


class TestLocSpace(CustomTestCase):
    def test_numbers_follow_the_pages(self):
        for page_size, num_pages, reserved in itertools.product(
            (1, 4, 64), (0, 1, 5), (0, 1, 3)
        ):
            space = LocSpace(
                page_size=page_size, num_pages=num_pages, reserved_pages=reserved
            )
            pages = range(reserved, reserved + num_pages)
            locs = [p * page_size + i for p in pages for i in range(page_size)]
            self.assertEqual(space.size, len(locs))
            self.assertEqual(list(range(space.first, space.reach)), locs)

    def test_a_pool_of_pool_size_has_reach_rows(self):
        space = LocSpace(page_size=16, num_pages=5)
        pool = mha_pool(space.pool_size, space.page_size)
        self.assertEqual(pool.k_buffer[0].shape[0], space.reach)

    def test_scale(self):
        self.assertEqual(LocSpace(page_size=64, num_pages=1).scale(page_size=16), 4)
        with self.assertRaisesRegex(ValueError, "64 is no multiple of page 48"):
            LocSpace(page_size=64, num_pages=1).scale(page_size=48)

    def test_bad_numbers_are_refused(self):
        for page_size, num_pages, reserved in ((0, 1, 1), (1, -1, 1), (1, 1, -1)):
            with self.assertRaisesRegex(ValueError, f"page_size={page_size}"):
                LocSpace(
                    page_size=page_size, num_pages=num_pages, reserved_pages=reserved
                )


if __name__ == "__main__":
    unittest.main()
