"""The KV budget takes what the pools take, target and draft, on really built pools."""

import itertools
import unittest

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.test import budget_servers as servers
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.pool_budgets import build, page_bytes, pool_bytes

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

DCP_SIZES = (1, 2, 8)
EAGLE_DRAFTS = (servers.EAGLE, servers.EAGLE3, servers.STANDALONE, servers.NEXTN_MLA)
BLOCK_DRAFTS = (servers.DFLASH, servers.DSPARK)

# Tokens, and bytes of each pool, of a target alone without DCP: as ever.
UNCHANGED = (
    (servers.MHA, 131072, [8388864]),
    (servers.MQA, 131072, [8388864]),
    (servers.MLA, 43688, [8388864]),
    (servers.DSA, 11648, [8432640]),
    (servers.HYBRID_LINEAR, 131072, [8388864]),
    (servers.HYBRID_SWA, 174760, [5592448, 2796288]),
    (servers.MINIMAX, 87380, [5592576, 1398144, 1398144]),
    (servers.DSA_HISPARSE, 4672, [8343552]),
)


class TestDraftPoolBudget(CustomTestCase):
    def check(self, targets, drafts, dcp_sizes=DCP_SIZES, **fields):
        for target, draft, dcp_size in itertools.product(targets, drafts, dcp_sizes):
            with self.subTest(
                target.name, draft=draft and draft.name, dcp=dcp_size, **fields
            ):
                target = target._replace(fields={**target.fields, **fields})
                built = build(target, draft, dcp_size=dcp_size)
                pages = sum(map(page_bytes, built.pools))
                if target.name == servers.UNIFIED.name:
                    # Whole 4 KiB, a page that is never handed out, two roundings.
                    pages = 3 * pages + 4096
                self.assertAlmostEqual(built.charged, built.allocated, delta=pages)

    def test_a_target_alone(self):
        self.check(
            (servers.MHA, servers.MQA, servers.MLA, servers.HYBRID_LINEAR), (None,)
        )

    def test_heads_that_dcp_ranks_share(self):
        targets = servers.HYBRID_SWA, servers.WINDOW_HEADS, servers.MINIMAX
        self.check(targets, (None,))

    def test_an_eagle_draft_has_a_row_for_each_loc(self):
        self.check((servers.MHA, servers.MLA, servers.HYBRID_LINEAR), EAGLE_DRAFTS)

    def test_a_dsa_draft_holds_index_keys(self):
        self.check((servers.DSA,), (None, servers.NEXTN_DSA, servers.EAGLE3), (1,))

    def test_a_dsa_draft_under_dcp_holds_a_key_for_each_loc(self):
        self.check((servers.DSA,), (None, servers.NEXTN_DSA, servers.EAGLE3), (2, 8))

    def test_each_runner_of_a_multi_layer_draft_has_a_pool(self):
        self.check((servers.MLA,), (servers.MULTI_LAYER,), (1, 4))

    def test_a_window_targets_locs_do_not_widen(self):
        self.check((servers.HYBRID_SWA,), EAGLE_DRAFTS[:3])

    def test_a_drafts_windows_have_its_own_heads(self):
        self.check((servers.HYBRID_SWA,), (servers.WINDOW_STANDALONE,))

    def test_each_runner_of_a_window_draft_has_a_pool(self):
        self.check((servers.WINDOW_HEADS,), (servers.WINDOW_MULTI_LAYER,))
        self.check((servers.STEP,), (servers.STEP_MULTI_LAYER,))

    def test_an_mla_drafts_windows(self):
        self.check((servers.MLA_WINDOWS,), (servers.NEXTN_WINDOWS, servers.EAGLE3))

    def test_each_depth_of_an_inkling_draft_has_a_pool(self):
        self.check((servers.INKLING,), (servers.INKLING_MTP,))
        target, draft = servers.INKLING_LOCAL, servers.INKLING_LOCAL_MTP
        self.check((target,), (draft,))
        draft_dtype = {"speculative_draft_kv_cache_dtype": "fp8_e4m3"}
        self.check((target,), (draft,), (1, 8), **draft_dtype)

    def test_a_block_draft_of_a_window_target(self):
        self.check((servers.HYBRID_SWA,), BLOCK_DRAFTS)

    def test_hisparse_locs_span_the_host(self):
        self.check((servers.DSA_HISPARSE,), (None, servers.EAGLE3))

    def test_a_dsa_draft_of_a_hisparse_target(self):
        self.check((servers.DSA_HISPARSE,), (servers.NEXTN_DSA,))

    def test_a_block_draft_of_a_hisparse_target(self):
        self.check((servers.DSA_HISPARSE,), BLOCK_DRAFTS)

    def test_a_minimax_target_with_hisparse(self):
        self.check((servers.MINIMAX_HISPARSE,), (None, servers.EAGLE3, *BLOCK_DRAFTS))

    def test_a_block_draft_has_a_row_for_each_loc(self):
        self.check((servers.MLA, servers.MINIMAX), BLOCK_DRAFTS, (1, 8))

    def test_a_unified_buffer_leaves_room_for_a_private_draft(self):
        self.check((servers.UNIFIED,), (None, servers.DSPARK), (2, 8))

    def test_block_scaled_drafts(self):
        targets = [*map(servers.with_blocks, (servers.MHA, servers.HYBRID_SWA))]
        drafts = [*map(servers.with_blocks, EAGLE_DRAFTS[:3]), servers.NEXTN_MLA]
        for fields in servers.BLOCK_SCALED:
            self.check((*targets, servers.MLA), drafts, (8,), **fields)

    def test_block_scaled_windows_of_a_draft(self):
        target = servers.with_blocks(servers.HYBRID_SWA)
        draft = servers.with_blocks(servers.WINDOW_STANDALONE)
        for fields in servers.BLOCK_SCALED[:2]:
            self.check((target,), (draft,), (1, 8), **fields)

    def test_block_scaled_block_drafts(self):
        drafts = [*map(servers.with_blocks, BLOCK_DRAFTS)]
        for fields in servers.BLOCK_SCALED[:2]:
            self.check((servers.MLA,), drafts, (1, 8), **fields)

    def test_a_draft_with_a_kv_dtype_of_its_own(self):
        fields = {"kv_cache_dtype": "fp8_e4m3"}
        for draft_dtype in ("bf16", "fp8_e4m3", "auto"):
            fields["speculative_draft_kv_cache_dtype"] = draft_dtype
            self.check((servers.MLA,), EAGLE_DRAFTS, (1, 8), **fields)

    def test_a_block_draft_on_the_targets_backend(self):
        # FA4 gives a block draft its compute dtype.
        fields = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "fa4"}
        self.check((servers.MHA, servers.MLA), BLOCK_DRAFTS, (1, 8), **fields)

    def test_nothing_changes_without_dcp_and_draft(self):
        for target, tokens, sizes in UNCHANGED:
            with self.subTest(target.name):
                built = build(target, None, dcp_size=1)
                self.assertEqual(built.target.max_total_num_tokens, tokens)
                self.assertEqual([pool_bytes(pool) for pool in built.pools], sizes)


if __name__ == "__main__":
    unittest.main()
