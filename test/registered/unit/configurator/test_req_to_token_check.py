"""The boot assertion on req_to_token rows, reached through the real configurator."""

import contextlib
import os
import re
import shutil
import unittest
from unittest.mock import patch

# Read when triton is imported: a pool with speculation warms up a Triton copy.
os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.page_geometry import PageGeometryError
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.draft_configurator import (
    TINY_LLAMA,
    draft_configurator,
    write_config,
)
from sglang.test.kv_cache_families import FAMILIES, topology

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

PAGE = 16
CONTEXT_LEN = TINY_LLAMA["max_position_embeddings"]
BLOCK = 16


class TestReqToTokenCheck(CustomTestCase):
    """A compact DFLASH draft shares its target's allocator and builds its own rows."""

    @classmethod
    def setUpClass(cls):
        cls.model = write_config(TINY_LLAMA)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.model)

    @contextlib.contextmanager
    def compact_draft(self, family, dcp_size):
        spec = {
            "speculative_algorithm": "DFLASH",
            "speculative_num_steps": 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": BLOCK,
        }
        with (
            self.subTest(family.name, dcp=dcp_size),
            topology(dcp_size, PAGE, **spec),
        ):
            allocator, _ = family.build(8 * PAGE, PAGE, dcp_size)
            configurator = draft_configurator(
                allocator,
                model_path=self.model,
                max_total_num_tokens=8 * PAGE,
                algorithm="DFLASH",
            )
            configurator.req_to_token_pool = None
            yield configurator, allocator.page_size

    def cases(self):
        for family in FAMILIES:
            # A page-interleaved draft takes a shard group; others have other pages.
            own = family.name != "page_interleave" and PAGE in family.page_sizes
            if own and family.drafts:
                yield family, 1
                yield family, 8

    def reach(self, page):
        longest = CONTEXT_LEN - 4 + 2 * BLOCK
        return -(-longest // page) * page

    def test_rows_page_as_the_shared_allocator(self):
        for case in self.cases():
            with self.compact_draft(*case) as (configurator, page):
                rows = configurator.configure(pre_model_load_memory=1).req_to_token_pool
                self.assertEqual(rows.req_to_token.shape[1], self.reach(page))

    def test_a_row_one_column_short_does_not_boot(self):
        for case in self.cases():
            with self.compact_draft(*case) as (configurator, page):
                reach = self.reach(page)
                short = ReqToTokenPool(
                    size=2,
                    max_context_len=reach - 1,
                    device="cpu",
                    enable_memory_saver=False,
                )
                said = re.escape(
                    f"REQ_TO_TOKEN_ROW_MISMATCH row={reach - 1} page={page} "
                    f"reaches={reach}"
                )
                with (
                    patch.object(
                        KVCacheConfigurator,
                        "_build_req_to_token_pool",
                        return_value=short,
                    ),
                    self.assertRaisesRegex(PageGeometryError, said),
                ):
                    configurator.configure(pre_model_load_memory=1)


if __name__ == "__main__":
    unittest.main()
