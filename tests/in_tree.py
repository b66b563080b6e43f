"""Runs the tests that the series adds to SGLang as SGLang runs them, on one tree."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import forked_pytest
from conftest import linked_copy
from packaging.specifiers import SpecifierSet

from kvgeom import series, tree
from kvgeom.plan import Plan

STACK = series.load()
UNIT = "test/registered/unit/"  # the others need GPUs
IDS = [pr.id for pr in STACK.prs]
PRS = [pr.id for pr in STACK.prs if any(f.startswith(UNIT) for f in pr.files)]

# Run once, at their own PR: a sweep of its class (tree, chain, block, n-gram) stays elsewhere.
# The last one is about the steps that only EAGLE3's sweep has.
LONG = {
    "test_eagle3", "test_standalone", "test_frozen_kv_mtp", "test_dspark",
    "test_every_step_count_ends_where_eagle3_ends",
}  # fmt: skip

# Tests that only some releases can run, and why.
ONLY = {
    "test_draft_tokens_are_logical_already": (">=0.5.21", "no logical_token_capacity before"),
    "test_dsa_draft_indexes_scheduled_pages": (">=0.5.22", "a DSA draft pages 64 only, so no DCP"),
    "test_a_draft_fused_into_the_targets_buffer_passes": (">=0.5.23", "no fused SWA draft pool"),
    "test_swa_request_cap_has_one_reserve": (">=0.5.21", "the cap is no function of its own"),
    "test_adaptive_rows_and_states_hold_the_longest_draft": (">=0.5.19", "no bag leaf for it"),
    "test_loc_rows_are_the_buffers_rows": (">=0.5.19", "a unified size ends inside a page"),
    "test_uno": (">=0.5.20", "no UNO"),
    "test_eagle_tree": (">=0.5.22", "a finishing request is dropped one round later"),
    "test_block_draft": (">=0.5.22", "as test_eagle_tree"),
    "test_tree_mask_of_a_pipeline_stage": (">=0.5.21", "no speculation over pipeline stages"),
    "test_deepseek_v4_hip_tables_have_one_width": (">=0.5.23", "no low-ratio tables"),
    "test_minimax_captured_bound": (">=0.5.22", "a verify is captured at its own lengths"),
    "test_minimax_nvfp4_plan": (">=0.5.23", "no NVFP4 backend"),
    "test_minimax_nvfp4_plan_stays_in_what_msa_indexes": (">=0.5.23", "no NVFP4 backend"),
    "test_minicpm_refuses_a_short_context": (">=0.5.19", "no MiniCPM backend"),
    "test_trtllm_mha_fp4_prefill_rows": (">=0.5.21", "no FP4 prefill"),
    "test_tokenspeed_mla_graph": ("<0.5.23", "no tokenspeed backend since"),
    "test_qsa_graph": (">=0.5.20", "no QSA backend"),
    "test_xpu_graph": (">=0.5.20", "no speculation in XPU graphs"),
    "test_ascend_graph_without_host_lengths": (">=0.5.23", "a replay needs host lengths"),
    "test_every_slot_comes_back_on_the_controller": ("<0.5.19", "a sidecar since"),
    "test_a_window_draft_follows_the_windows_slots": (">=0.5.18", "no SWA sidecars"),
    "test_a_paged_window_draft_follows_the_windows_slots": (">=0.5.18", "no SWA sidecars"),
    "test_a_window_draft_with_full_locs_follows_the_full_slots": (">=0.5.22", "no such draft"),
    "test_the_targets_index_keys_follow_every_slot": (">=0.5.22", "index keys are sharded"),
    "test_a_drafts_index_keys_follow_every_slot": (">=0.5.22", "index keys are sharded"),
    "test_a_page_interleaved_targets_index_keys_keep_its_rows": (">=0.5.23", "no such pool"),
    "test_qsa_index_keys_follow_every_slot": (">=0.5.22", "no QSA host pool"),
    "test_a_qsa_drafts_index_keys_follow_every_slot": (">=0.5.22", "no QSA host pool"),
    "test_a_qsa_target_has_no_host_pool_under_dcp": (">=0.5.22", "no QSA host pool"),
    "test_counts_the_rows_that_the_sidecar_has": (">=0.5.21", "no auto-sizing"),
    "test_a_dsa_draft_under_dcp_holds_a_key_for_each_loc": (">=0.5.22", "index keys are sharded"),
    "test_a_dsa_draft_of_a_hisparse_target": (">=0.5.22", "its pool is built as a target's"),
    "test_a_minimax_target_with_hisparse": (">=0.5.21", "no HiSparse for MiniMax"),
    "test_a_unified_buffer_leaves_room_for_a_private_draft": (">=0.5.20", "no DCP with it"),
    "test_a_block_draft_has_a_row_for_each_loc": (">=0.5.18", "its rows are the target's"),
    "test_a_block_draft_of_a_window_target": (">=0.5.18", "not charged"),
    "test_a_drafts_windows_have_its_own_heads": (">=0.5.19", "charged as full layers"),
    "test_each_runner_of_a_window_draft_has_a_pool": (">=0.5.19", "charged as full layers"),
    "test_a_block_draft_of_a_hisparse_target": (">=0.5.18", "its rows are the target's"),
    "test_block_scaled_drafts": (">=0.5.21", "an FP4 target is charged a workspace it lacks"),
    "test_block_scaled_windows_of_a_draft": (">=0.5.19", "charged as full layers"),
    "test_block_scaled_block_drafts": (">=0.5.18", "its rows are the target's"),
    "test_a_draft_with_a_kv_dtype_of_its_own": (">=0.5.18", "no such argument"),
    "test_a_block_draft_on_the_targets_backend": (">=0.5.22", "its worker alone knows it"),
    "test_an_mla_drafts_windows": (">=0.5.19", "no such model"),
    # 0.5.21 gives the depths past the first no layer; before 0.5.19 all are charged as full ones.
    "test_each_depth_of_an_inkling_draft_has_a_pool": (">=0.5.19, !=0.5.21", "see above"),
    "test_charged_is_allocated_in_the_product": (">=0.5.23", "validation has other functions"),
    "test_only_what_sglang_refuses_is_left_out": (">=0.5.23", "validation has other functions"),
    "test_every_pool_configurator_is_driven": (">=0.5.23", "validation has other functions"),
    "test_every_draft_algorithm_is_driven": (">=0.5.23", "validation has other functions"),
    "test_an_mla_draft_stores_its_share_of_the_locs": (">=0.5.20", "its writes have two rules"),
}


def node_ids(*pr_ids: str, release: str = "") -> dict[str, str]:
    """pytest's name of each unit test that these PRs add, or that a release can run."""
    found = {}
    for path in (f for pr in map(STACK.pr, pr_ids) for f in pr.files if f.startswith(UNIT)):
        for case in ast.parse((STACK.root / path).read_bytes()).body:
            for test in case.body if isinstance(case, ast.ClassDef) else ():
                if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                    found[test.name] = f"{STACK.root / path}::{case.name}::{test.name}"
    for name, (when, _) in ONLY.items():
        if release and release not in SpecifierSet(when):
            found.pop(name, None)
    return found


class Tree:
    """A private copy of a released SGLang, in `folder`, in one state of the series after another.

    `made`: the plan of the stack on it. `before`: folders whose packages come before the
    environment's.
    """

    def __init__(self, folder: Path, target: Path, made: Plan, before: Sequence[Path] = ()):
        self.folder, self.before = folder, before
        self.root = linked_copy(folder, target)
        self.package = tree.find(self.root)
        self.prs = made.prs
        self.written: dict[str, bytes] = {}

    def become(self, edited: int, added: int) -> None:
        """Take on the edits of the first `edited` PRs, the files that the first `added` ones add,
        and nothing else of the series."""
        wanted: dict[str, bytes] = {}
        for number, pr in enumerate(self.prs, start=1):
            for path, (released, after) in pr.changes.items():
                if number <= (added if released is None else edited):
                    wanted[path] = after
        for path in {p for p, _ in wanted.items() ^ self.written.items()}:
            target = self.package.path(path)
            target.unlink(missing_ok=True)  # the file of the release is linked to others
            if path in wanted:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(wanted[path])
            elif (released := self.folder / target.relative_to(self.root)).exists():
                shutil.copy2(released, target)
        self.written = wanted

    def outcomes(self, nodes: Iterable[str]) -> dict[str, str | None]:
        """The test functions of `nodes`: None where they pass, else what they say."""
        report, log = (self.root.parent / f"{self.root.name}{kind}" for kind in (".xml", ".log"))
        report.unlink(missing_ok=True)
        options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--rootdir=/", "-c", os.devnull]
        options += ["--tb=native", "-p", "no:unraisableexception"]  # long files, large heaps
        arguments = [*options, f"--junit-xml={report}", *nodes]
        forked_pytest.run(arguments, cwd=self.root, path=(self.root, *self.before), log=log)
        assert report.is_file(), log.read_text()[-3000:]
        found: dict[str, str | None] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [e for e in case if e.tag in ("failure", "error", "skipped")]
            said = "\n".join((e.get("message") or "") + (e.text or "") for e in bad)
            found[case.get("name")] = said or found.get(case.get("name"))
        assert found, log.read_text()[-3000:]
        return found
