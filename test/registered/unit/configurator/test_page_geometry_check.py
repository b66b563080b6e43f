"""The boot assertion on real pools: silent exactly where every loc has a row."""

import itertools
import shutil
import unittest

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from unittest.mock import PropertyMock, patch

import torch

from sglang.srt.configurator.page_geometry_check import check_page_geometry
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.page_geometry import PageGeometryError
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.draft_configurator import (
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
from sglang.test.kv_cache_families import (
    FAMILIES,
    family,
    topology,
    unified_swa,
)
from sglang.test.kv_pools import mha_pool, swa_pool

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestCheckPageGeometry(FamilyTestCase):
    def test_every_target_pool_passes(self):
        for case in CASES:
            with self.case(*case) as (allocator, pool):
                check_page_geometry(
                    allocator=allocator, pool=pool, is_draft_worker=False
                )

    def test_draft_pool_passes_exactly_when_every_loc_has_a_row(self):
        for case in CASES:
            with self.case(*case) as (allocator, _):
                page_size, reach = allocator.page_size, reach_of(*case)
                for pages in range(reach // page_size - 2, reach // page_size + 2):
                    pool = mha_pool((pages - 1) * page_size, page_size)
                    self.check_draft(allocator, pool, reach)

    def check_draft(self, allocator, pool, reach):
        rows, page_size = pool.k_buffer[0].shape[0], allocator.page_size
        if rows >= reach:
            check_page_geometry(allocator=allocator, pool=pool, is_draft_worker=True)
            return
        with self.assertRaisesRegex(
            PageGeometryError,
            f"^DRAFT_POOL_PAGE_MISMATCH pool={page_size} allocator={page_size} "
            f"reaches={reach} valid_to={rows}$",
        ):
            check_page_geometry(allocator=allocator, pool=pool, is_draft_worker=True)

    def test_target_pool_short_by_a_page_is_refused(self):
        for dcp_size, page_size in itertools.product(DCP_SIZES, (4, 64)):
            with topology(dcp_size, page_size):
                size = PAGES * page_size
                allocator, _ = family("paged").build(size, page_size, dcp_size)
                with self.assertRaisesRegex(
                    PageGeometryError, "^TARGET_POOL_PAGE_MISMATCH"
                ):
                    check_page_geometry(
                        allocator=allocator,
                        pool=mha_pool(size - page_size, page_size),
                        is_draft_worker=False,
                    )

    def test_message_names_pages_reach_and_rows(self):
        with topology(8, 64):
            allocator, _ = family("paged").build(512, 64, 8)
            with self.assertRaises(PageGeometryError) as caught:
                check_page_geometry(
                    allocator=allocator,
                    pool=mha_pool(4096, 64),
                    is_draft_worker=True,
                )
        self.assertEqual(
            str(caught.exception),
            "DRAFT_POOL_PAGE_MISMATCH pool=64 allocator=512 reaches=4608 valid_to=4160",
        )

    def test_rows_without_the_page_are_refused_too(self):
        with topology(8, 64):
            allocator, _ = family("paged").build(512, 64, 8)
            pool = mha_pool(2 * allocator.loc_space.reach, 64)
            with self.assertRaisesRegex(PageGeometryError, "pool=64 allocator=512"):
                check_page_geometry(
                    allocator=allocator, pool=pool, is_draft_worker=True
                )

    def test_window_side_of_a_draft_is_checked(self):
        with topology(1, 4):
            allocator, _ = family("swa").build(64, 4, 1)
            check_page_geometry(
                allocator=allocator, pool=swa_pool(64, 32, 4), is_draft_worker=True
            )
            short = swa_pool(64, 28, 4)
            with self.assertRaisesRegex(PageGeometryError, "reaches=36 valid_to=32"):
                check_page_geometry(
                    allocator=allocator, pool=short, is_draft_worker=True
                )
            # Indexed by full ids, the same window pool needs a row for each.
            full = swa_pool(64, 32, 4)
            full.swa_uses_full_indices = True
            with self.assertRaisesRegex(PageGeometryError, "reaches=68 valid_to=36"):
                check_page_geometry(
                    allocator=allocator, pool=full, is_draft_worker=True
                )

    def test_a_draft_fused_into_the_targets_buffer_passes(self):
        from sglang.srt.mem_cache.layout.fused_draft import (
            DenseDraftRegion,
            FusedDraftPlacement,
        )
        from sglang.srt.mem_cache.unified_draft_pool import (
            UnifiedDraftKVPool,
            UnifiedDraftSWAKVPool,
        )

        region = DenseDraftRegion(
            lane_num=1, head_num=1, head_dim=4, store_dtype=torch.float32
        )
        hosts = {"full": region, "swa": region}
        for page_size in (1, 4):
            with self.subTest(page=page_size), topology(1, page_size):
                placement = FusedDraftPlacement.from_counts(
                    counts={host: [1] for host in hosts}, regions=hosts
                )
                allocator, _ = unified_swa(64, page_size, 1, fused_draft=placement)
                shared = {
                    "unified_buffer": allocator.unified_buffer,
                    "host_allocator": allocator,
                    "page_size": page_size,
                }
                pools = (
                    UnifiedDraftKVPool(
                        **shared, host_sub_pool_name="full", layer_lanes={0: 0}
                    ),
                    UnifiedDraftSWAKVPool(
                        **shared, full_layer_lanes={0: 0}, swa_layer_lanes={1: 0}
                    ),
                    UnifiedDraftSWAKVPool(
                        **shared, full_layer_lanes={}, swa_layer_lanes={0: 0}
                    ),
                )
                for pool in pools:
                    check_page_geometry(
                        allocator=allocator, pool=pool, is_draft_worker=True
                    )

    def test_placeholder_is_not_checked(self):
        allocator, _ = family("paged").build(128, 16, 8)
        pool = mha_pool(64, 16)
        check_page_geometry(
            allocator=allocator, pool=pool, is_draft_worker=True, is_indexed=False
        )

    def test_loc_rows_are_the_buffers_rows(self):
        names = ("paged", "page_interleave", "unified_mamba", "unified_swa")
        for fam in (f for f in FAMILIES if f.name in names):
            with self.subTest(fam.name), topology(1, 4):
                _, pool = fam.build(48, 4, 1)
                full = pool.full_kv_pool if fam.name.startswith("unified") else pool
                self.assertEqual(full.loc_rows, full.k_buffer[0].shape[0])


class TestBootAssertion(CustomTestCase):
    """Through `KVCacheConfigurator.configure`, the path of every runner."""

    @classmethod
    def setUpClass(cls):
        cls.llama = write_config(TINY_LLAMA)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.llama)

    def configure(self, algorithm="EAGLE3"):
        allocator, _ = family("paged").build(128, 16, 8)
        configurator = draft_configurator(
            allocator,
            model_path=self.llama,
            max_total_num_tokens=128,
            algorithm=algorithm,
        )
        return configurator.configure(pre_model_load_memory=1)

    def test_a_draft_paged_as_scheduled_does_not_boot(self):
        scheduled = patch.object(
            KVCacheConfigurator, "pool_page_size", PropertyMock(return_value=16)
        )
        with topology(8, 16):
            self.configure()
            with (
                scheduled,
                self.assertRaisesRegex(
                    PageGeometryError,
                    "DRAFT_POOL_PAGE_MISMATCH pool=16 allocator=128 "
                    "reaches=1152 valid_to=1040",
                ),
            ):
                self.configure()

    def test_a_frozen_kv_draft_boots_with_its_placeholder(self):
        with topology(8, 16):
            self.configure(algorithm="FROZEN_KV_MTP")


if __name__ == "__main__":
    unittest.main()
