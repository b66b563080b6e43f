"""The boot warning on real pools: exactly where rows lie past what locs reach."""

import shutil
import unittest

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.configurator import loc_space_waste
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.draft_configurator import (
    TINY_LLAMA,
    TINY_MLA,
    draft_configurator,
    write_config,
)
from sglang.test.family_cases import CASES, FamilyTestCase, reach_of
from sglang.test.kv_cache_families import family, topology
from sglang.test.kv_pools import mha_pool

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

LOG = loc_space_waste.logger.name
LARGE_PAGES = [case for case in CASES if case[1] == case[0].page_sizes[-1]]


class TestLocSpaceWaste(FamilyTestCase):
    def warn(self, allocator, pool, *, is_draft_worker):
        loc_space_waste.warn_loc_space_waste(
            allocator=allocator, pool=pool, is_draft_worker=is_draft_worker
        )

    def test_targets_are_no_larger_than_their_locs(self):
        for case in LARGE_PAGES:
            with self.case(*case) as (allocator, pool), self.assertNoLogs(LOG):
                self.warn(allocator, pool, is_draft_worker=False)

    def test_two_pages_too_many_are_named_with_their_bytes(self):
        for case in LARGE_PAGES:
            with self.case(*case) as (allocator, _):
                page_size = allocator.page_size
                reach = reach_of(*case)
                # A pool adds one page to its size.
                fits, wide = (
                    mha_pool(reach + more * page_size, page_size) for more in (0, 1)
                )
                with self.assertNoLogs(LOG):
                    self.warn(allocator, fits, is_draft_worker=True)
                with self.assertLogs(LOG, "WARNING") as logs:
                    self.warn(allocator, wide, is_draft_worker=True)
                wasted = sum(
                    buffer[reach:].nbytes for buffer in wide.k_buffer + wide.v_buffer
                )
                self.assertEqual(
                    [record.getMessage() for record in logs.records],
                    [
                        f"LOC_SPACE_WASTE pool=draft rows={reach + 2 * page_size} "
                        f"reached={reach} bytes={wasted}"
                    ],
                )

    def test_a_sharded_target_counts_every_loc_of_a_row(self):
        with topology(8, 4):
            allocator, _ = family("paged").build(64, 4, 8)
            with self.assertLogs(LOG, "WARNING") as logs:
                self.warn(allocator, mha_pool(72, 4), is_draft_worker=False)
        self.assertIn("rows=76 reached=68", logs.output[0])


class TestBootWarning(CustomTestCase):
    """Through `KVCacheConfigurator.configure`, the path of every runner."""

    def configure(self, config, **kwargs):
        allocator, _ = family("paged").build(64, 4, 8)
        folder = write_config(config)
        try:
            return draft_configurator(
                allocator, model_path=folder, max_total_num_tokens=64, **kwargs
            ).configure(pre_model_load_memory=1)
        finally:
            shutil.rmtree(folder)

    def test_a_replicated_draft_is_silent(self):
        with topology(8, 4), self.assertNoLogs(LOG):
            self.configure(TINY_LLAMA)

    def test_an_mla_draft_stores_its_share_of_the_locs(self):
        with topology(8, 4), self.assertLogs(LOG, "WARNING") as logs:
            result = self.configure(TINY_MLA, use_mla_backend=True)
        rows = result.token_to_kv_pool.kv_buffer[0]
        reached = result.token_to_kv_pool_allocator.loc_space.reach // 8
        self.assertIn(
            f"LOC_SPACE_WASTE pool=draft rows={len(rows)} reached={reached} "
            f"bytes={rows[reached:].nbytes}",
            logs.output[0],
        )


if __name__ == "__main__":
    unittest.main()
