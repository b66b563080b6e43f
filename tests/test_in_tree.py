"""The tests that the series adds to SGLang, run as SGLang runs them: each PR's own tests fail with
the PR's edits left out (the PRs below it applied), pass with them, and with the whole stack."""

from __future__ import annotations

import pytest
from conftest import RELEASE, linked_installation
from in_tree import IDS, LONG, PRS, STACK, Tree, node_ids

from kvgeom import actions, tree
from kvgeom.plan import PrState

# Which tests of a PR fail without its edits, and what the failure says.
RED = {
    "page-geometry": {
        "test_drained_locs_are_exactly_the_loc_space": "has no attribute 'loc_space'",
        "test_page_is_the_built_allocators_own": "has no attribute 'loc_space'",
        "test_a_size_between_pages_does_not_extend_the_reach": "has no attribute 'loc_space'",
        "test_resize_moves_the_loc_space": "has no attribute 'loc_space'",
    },
    "draft-pool-page": {
        # A draft of an SWA or HiSparse target is paged dcp_size times too wide.
        "test_pages_as_its_allocator": "2 != 1",
        "test_has_a_row_for_every_loc_and_no_page_more": "not less than or equal to 0",
        "test_scale_is_the_allocators_own_widening": "2 != 1",
        "test_frozen_kv_draft_keeps_its_placeholder": "512 != 64",
        "test_dsa_draft_indexes_scheduled_pages": "128 != 64",
    },
    "page-geometry-check": {
        # The fault itself: without the call, nothing refuses to boot.
        "test_a_draft_paged_as_scheduled_does_not_boot": "PageGeometryError not raised",
        "test_every_target_pool_passes": "has no attribute 'loc_rows'",
        "test_draft_pool_passes_exactly_when_every_loc_has_a_row": "'shares_target_rows'",
        "test_target_pool_short_by_a_page_is_refused": "has no attribute 'loc_rows'",
        "test_message_names_pages_reach_and_rows": "no attribute 'shares_target_rows'",
        "test_rows_without_the_page_are_refused_too": "no attribute 'shares_target_rows'",
        "test_window_side_of_a_draft_is_checked": "no attribute 'shares_target_rows'",
        "test_loc_rows_are_the_buffers_rows": "has no attribute 'loc_rows'",
        "test_a_draft_fused_into_the_targets_buffer_passes": ("no attribute 'shares_target_rows'"),
    },
    "req-rows": {
        "test_uno": "UNO: 331 configurations waste",
        "test_dflash": "DFLASH: 301 configurations overrun",
        "test_dspark": "DSPARK: 268 configurations overrun",
        "test_eagle": "EAGLE: 74 configurations overrun",
        "test_eagle3": "EAGLE3: 517 configurations overrun",
        "test_frozen_kv_mtp": "FROZEN_KV_MTP: 20 configurations overrun",
        "test_ngram": "NGRAM: 130 configurations overrun",
        "test_standalone": "STANDALONE: 20 configurations overrun",
        "test_every_algorithm": "(70, ('EAGLE3', 5, 4, 8, 1, 1, 'plain'",
        "test_every_builder": "(1, ('DSPARK', 1, 1, 9, 1, 1, 'plain'",
        "test_compact_draft_table": "8 != 0",
        "test_eagle_tree": "36 not less than or equal to 12",
        "test_every_prepare_passes_it": "PageGeometryError not raised",
        "test_names_request_position_row_page_and_reserve": "PageGeometryError not raised",
        "test_a_row_one_column_short_does_not_boot": "PageGeometryError not raised",
        "test_rows_page_as_the_shared_allocator": "175 != 160",
        "test_adaptive_rows_and_states_hold_the_longest_draft": "1059 != 1052",
        "test_swa_request_cap_has_one_reserve": "640 != 512",
        "test_unset_draft_tokens_are_refused_while_rows_are_built": "ValueError not raised",
    },
    "attention-tables": {
        # Columns of the request that its table lacks, or words past the buffer's end.
        "test_fa_graph": "Lists differ: [4, 4] != [0, 0]",
        "test_fa_eager": "Lists differ: [4, 4] != [0, 0]",
        "test_fa_draft_steps": "Lists differ: [2, 2] != [0, 0]",
        "test_fa_tree": "Lists differ: [((2, 48), 0, 2)] != []",
        "test_trtllm_mha_graph": "Lists differ: [1, 1] != [0, 0]",
        "test_trtllm_mha_eager": "Lists differ: [((2, 3), 0, 1)] != []",
        "test_trtllm_mla_graph": "Lists differ: [1, 1] != [0, 0]",
        "test_trtllm_mla_eager": "Lists differ: [1, 1] != [0, 0]",
        "test_cutedsl_mla_graph": "Lists differ: [1, 1] != [0, 0]",
        "test_flashmla_graph": "Lists differ: [((2, 3), 0, 1)] != []",
        "test_flashmla_eager": "Lists differ: [((2, 2), 0, 1)] != []",
        "test_flashmla_graph_table_is_as_wide_as_the_row": "3 != 4",
        "test_xpu_graph": "Lists differ: [((2, 48), 0, 4)] != []",
        "test_aiter_unified": "Lists differ: [((2, 48), 0, 4)] != []",
        "test_ascend_graph": "tensor a (2) must match the size of tensor b (3)",
        "test_ascend_graph_without_host_lengths": "tensor a (2) must match the size of tensor b",
        "test_qsa_graph": "Lists differ: [1, 1] != [0, 0]",
        "test_triton_draft_indices": "Lists differ: [((5, 384), 0, 56)] != []",
        "test_aiter_draft_indices": "Lists differ: [((5, 384), 0, 56)] != []",
        "test_flashinfer_draft_indices": "used 440 > capacity 384",
        "test_flashinfer_mla_draft_indices": "used 110 > capacity 96",
        "test_triton_eager_indices": "Lists differ: [((96,), 0, 4)] != []",
        "test_flashinfer_mla_verify_indices": "tensor a (96) must match the size of tensor b (104)",
        "test_aiter_mla_verify_indices": "Lists differ: [((108,), 0, 4)] != []",
        "test_aiter_mask": "(384) must match the existing size (416)",
        "test_wave_mask": "(96) must match the existing size (416)",
        "test_verify_mask": "896 not greater than or equal to 928",
        "test_tree_mask_of_a_draft": "96 not greater than or equal to 100",
        "test_tree_mask_of_a_pipeline_stage": "96 not greater than or equal to 100",
        "test_tree_mask_without_draft_steps": "98 not greater than or equal to 102",
        "test_every_backend_takes_the_rows_width": "48 != 64",
        "test_triton_deterministic_splits": "3 not less than or equal to 2",
        "test_deepseek_v4_hip_tables_have_one_width": "2 != 1",
        "test_ngram_token_table_mirrors_the_rows": "torch.Size([3, 48]) != torch.Size([3, 52])",
        "test_minimax_captured_bound": "256 not greater than or equal to 260",
        "test_minimax_nvfp4_plan": "256 not greater than or equal to 260",
    },
    "draft-host-pool": {
        # The first slot without a row.
        "test_a_window_draft_follows_the_windows_slots": "index 104 is out of bounds",
        "test_a_window_draft_with_full_locs_follows_the_full_slots": "index 104 is out of bounds",
        "test_the_targets_index_keys_follow_every_slot": "for dimension 0 with size 14",
        "test_a_drafts_index_keys_follow_every_slot": "[6, 16896] cannot be broadcast",
        "test_qsa_index_keys_follow_every_slot": "index 13 is out of bounds",
        "test_counts_the_rows_that_the_sidecar_has": "7168) != 53248",
        "test_a_draft_pool_of_physical_rows_does_not_boot": "PageGeometryError not raised",
        "test_a_short_sidecar_of_the_target_does_not_boot": "PageGeometryError not raised",
        "test_passes_exactly_when_every_slot_has_a_row": "has no attribute 'sidecar_size'",
        "test_a_sidecar_of_the_target_has_its_own_code": "has no attribute 'sidecar_size'",
        "test_sharded_pools_count_every_slot_of_a_row": "has no attribute 'sidecar_size'",
    },
    "draft-budget": {
        # Bytes charged against bytes of the built pools, and a page or so as tolerance.
        "test_heads_that_dcp_ranks_share": " delta (",
        "test_an_eagle_draft_has_a_row_for_each_loc": " delta (",
        "test_a_dsa_draft_holds_index_keys": " delta (",
        "test_a_dsa_draft_under_dcp_holds_a_key_for_each_loc": " delta (",
        "test_each_runner_of_a_multi_layer_draft_has_a_pool": " delta (",
        "test_a_window_targets_locs_do_not_widen": " delta (",
        "test_a_drafts_windows_have_its_own_heads": " delta (",
        "test_each_runner_of_a_window_draft_has_a_pool": " delta (",
        "test_a_block_draft_of_a_window_target": " delta (",
        "test_hisparse_locs_span_the_host": " delta (",
        "test_a_dsa_draft_of_a_hisparse_target": " delta (",
        "test_a_block_draft_of_a_hisparse_target": " delta (",
        "test_a_minimax_target_with_hisparse": " delta (",
        "test_a_block_draft_has_a_row_for_each_loc": " delta (",
        "test_a_unified_buffer_leaves_room_for_a_private_draft": " delta (",
        "test_block_scaled_drafts": " delta (",
        "test_block_scaled_windows_of_a_draft": " delta (",
        "test_block_scaled_block_drafts": " delta (",
        "test_a_draft_with_a_kv_dtype_of_its_own": " delta (",
        "test_a_block_draft_on_the_targets_backend": " delta (",
        "test_an_mla_drafts_windows": " delta (",
        "test_each_depth_of_an_inkling_draft_has_a_pool": " delta (",
        "test_charged_is_allocated_in_the_product": "Lists differ: [('mha'",
        "test_two_pages_too_many_are_named_with_their_bytes": "has no attribute 'locs_per_row'",
        "test_an_mla_draft_stores_its_share_of_the_locs": "no logs of level WARNING",
    },
    "dspark-hicache": {},  # already upstream in this release; red on 0.5.17
}


@pytest.fixture(scope="module")
def sglang(tmp_path_factory) -> Tree:
    folder = linked_installation(tmp_path_factory.mktemp("installed"))
    made = actions.planned(STACK, tree.find(folder), None)
    return Tree(folder, tmp_path_factory.mktemp("in_tree") / "tree", made)


@pytest.mark.parametrize("pr", [pr for pr in PRS if RED[pr]])
def test_red_without_its_edits(sglang, pr):
    above = IDS.index(pr)
    sglang.become(edited=above, added=above + 1)
    found = sglang.outcomes(node_ids(pr, release=RELEASE).values())
    failing = {name for name, said in found.items() if said}
    assert failing == set(RED[pr])
    for name, words in RED[pr].items():
        assert words in found[name], found[name][-2000:]


@pytest.mark.parametrize("pr", PRS[:-1])  # the last one's commit is the whole stack
def test_green_as_a_commit(sglang, pr):
    """As `kvgeom export` commits it: on the PRs below it, and without those above."""
    number = IDS.index(pr) + 1
    sglang.become(edited=number, added=number)
    nodes = node_ids(pr, release=RELEASE)
    assert sglang.outcomes(nodes.values()) == dict.fromkeys(nodes)


def test_only_what_is_upstream_has_no_red_case(sglang):
    upstream = [pr.pr.id for pr in sglang.prs if pr.state is PrState.UPSTREAM]
    assert [pr for pr in PRS if not RED[pr]] == upstream


def test_green_with_the_whole_stack(sglang):
    """No later PR breaks an earlier one's tests; the long ones run at their own PR, above."""
    sglang.become(edited=len(IDS), added=len(IDS))
    nodes = node_ids(*PRS, release=RELEASE)
    found = sglang.outcomes(at for name, at in nodes.items() if name not in LONG)
    assert {name: said for name, said in found.items() if said} == {}
