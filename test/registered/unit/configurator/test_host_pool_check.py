"""The boot assertion on real host pools: silent exactly where every slot has a row."""

import itertools
import unittest

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

import torch

from sglang.srt.configurator.host_pool_check import check_host_pool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.page_geometry import PageGeometryError
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.host_pools import cpu_host_pools, mla_host_pool

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PAGES = 3


def host_pool(pages, page_size, dcp_size):
    pool = MLATokenToKVPool(
        size=pages * page_size,
        page_size=page_size,
        dtype=torch.float32,
        kv_lora_rank=2,
        qk_rope_head_dim=1,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    return mla_host_pool(pool, page_size=page_size * dcp_size, dcp_size=dcp_size)


class TestCheckHostPool(CustomTestCase):
    def test_passes_exactly_when_every_slot_has_a_row(self):
        refused = 0
        for page_size, dcp_size in itertools.product((1, 4, 64), (1, 2, 4, 8)):
            with self.subTest(page=page_size, dcp=dcp_size), cpu_host_pools():
                anchor = host_pool(PAGES, page_size, dcp_size)
                reaches = 1 + int(anchor.alloc(anchor.available_size()).max())
                for pages in range(1, PAGES * dcp_size + 2):
                    pool = host_pool(pages, page_size, 1)
                    refused += self.check(anchor, pool, reaches)
        self.assertGreater(refused, 0)

    def check(self, anchor, pool, reaches):
        rows = pool.kv_buffer[0].shape[0]
        names = {"name": PoolName.DRAFT, "anchor_name": PoolName.KV}
        if rows >= reaches:
            check_host_pool(pool=pool, anchor=anchor, **names)
            return False
        with self.assertRaisesRegex(
            PageGeometryError,
            "^DRAFT_HOST_POOL_MISMATCH pool=draft anchor=kv "
            f"reaches={reaches} valid_to={rows}$",
        ):
            check_host_pool(pool=pool, anchor=anchor, **names)
        return True

    def test_a_sidecar_of_the_target_has_its_own_code(self):
        with cpu_host_pools():
            anchor, pool = host_pool(PAGES, 64, 8), host_pool(PAGES, 64, 1)
            with self.assertRaisesRegex(
                PageGeometryError,
                "^TARGET_HOST_POOL_MISMATCH pool=indexer anchor=kv "
                "reaches=3584 valid_to=448$",
            ):
                check_host_pool(
                    name=PoolName.INDEXER,
                    pool=pool,
                    anchor_name=PoolName.KV,
                    anchor=anchor,
                )

    def test_sharded_pools_count_every_slot_of_a_row(self):
        with cpu_host_pools():
            anchor, pool = host_pool(PAGES, 64, 8), host_pool(PAGES, 64, 8)
            check_host_pool(
                name=PoolName.INDEXER,
                pool=pool,
                anchor_name=PoolName.KV,
                anchor=anchor,
            )


if __name__ == "__main__":
    unittest.main()
