"""A draft pool, built by the real configurator, follows the allocator it shares."""

import contextlib
import itertools
import shutil
import unittest

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.draft_configurator import (
    TINY_DSA,
    TINY_LLAMA,
    draft_configurator,
    write_config,
)
from sglang.test.family_cases import (
    CASES,
    DCP_SIZES,
    PAGES,
    FamilyTestCase,
    reach_of,
)
from sglang.test.kv_cache_families import drain, family, topology

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

# A draft of a page-interleaved target takes the target's own pool shape.
DRAFT_CASES = [
    case for case in CASES if case[0].drafts and case[0].name != "page_interleave"
]


class TestDraftPoolPage(FamilyTestCase):
    @classmethod
    def setUpClass(cls):
        cls.llama = write_config(TINY_LLAMA)
        cls.dsa = write_config(TINY_DSA)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.llama)
        shutil.rmtree(cls.dsa)

    @contextlib.contextmanager
    def draft_case(self, fam, page_size, dcp_size):
        with self.case(fam, page_size, dcp_size) as (allocator, _):
            yield (
                allocator,
                draft_configurator(
                    allocator,
                    model_path=self.llama,
                    max_total_num_tokens=PAGES * page_size,
                ),
            )

    def test_pages_as_its_allocator(self):
        for case in DRAFT_CASES:
            with self.draft_case(*case) as (allocator, configurator):
                self.assertEqual(configurator.pool_page_size, allocator.page_size)
                pool = configurator.configure(pre_model_load_memory=1).token_to_kv_pool
                self.assertEqual(pool.page_size, allocator.page_size)

    def test_has_a_row_for_every_loc_and_no_page_more(self):
        for case in DRAFT_CASES:
            with self.draft_case(*case) as (allocator, configurator):
                pool = configurator.configure(pre_model_load_memory=1).token_to_kv_pool
                rows, reach = pool.k_buffer[0].shape[0], reach_of(*case)
                self.assertGreaterEqual(rows, reach)
                # Unified spaces are rounded up twice: one page for each.
                spare = 2 if case[0].name.startswith("unified") else 0
                self.assertLessEqual(rows - reach, spare * allocator.page_size)

    def test_scale_is_the_allocators_own_widening(self):
        for case in DRAFT_CASES:
            with self.draft_case(*case) as (allocator, configurator):
                scale = allocator.page_size // configurator.page_size
                self.assertEqual(configurator.loc_space_scale, scale)

    def test_draft_tokens_are_logical_already(self):
        for case in DRAFT_CASES:
            with self.draft_case(*case) as (_, configurator):
                capacity = configurator.logical_token_capacity(max_total_num_tokens=100)
                self.assertEqual(capacity, 100)

    def test_frozen_kv_draft_keeps_its_placeholder(self):
        with topology(8, 16):
            allocator, _ = family("paged").build(128, 16, 8)
            configurator = draft_configurator(
                allocator,
                model_path=self.llama,
                max_total_num_tokens=64,
                algorithm="FROZEN_KV_MTP",
            )
            result = configurator.configure(pre_model_load_memory=1)
            self.assertEqual(result.token_to_kv_pool.size, 64)
            self.assertEqual(result.max_total_num_tokens, 64)

    def test_dsa_draft_indexes_scheduled_pages(self):
        for name, dcp_size in itertools.product(("paged", "hisparse"), DCP_SIZES):
            with self.subTest(name, dcp=dcp_size), topology(dcp_size, 64):
                allocator, _ = family(name).build(512, 64, dcp_size)
                configurator = draft_configurator(
                    allocator,
                    model_path=self.dsa,
                    max_total_num_tokens=512,
                    use_mla_backend=True,
                )
                pool = configurator.configure(pre_model_load_memory=1).token_to_kv_pool
                self.assertEqual(pool.index_page_size, 64)
                self.assertEqual(pool.dcp_replicated, dcp_size > 1)
                self.assertEqual(pool.page_size, allocator.page_size)
                reach = max(drain(allocator)) + 1
                self.assertEqual(pool.kv_buffer[0].shape[0], reach)
                # Index rows hold whole pages of keys: bytes per key, times reach.
                keys = pool.index_k_with_scale_buffer[0]
                self.assertGreaterEqual(keys.numel(), reach * pool.index_head_dim)


if __name__ == "__main__":
    unittest.main()
