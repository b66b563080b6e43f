"""The stack on every released SGLang: it applies and comes off byte for byte, and the tests that it
adds to SGLang pass with it and fail without it. The newest release runs the whole set, in
test_in_tree.py; the older ones leave out what they lack and the long sweeps."""

from __future__ import annotations

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import RELEASE, linked_copy, snapshot
from in_tree import STACK, node_ids, outcomes
from packaging.specifiers import SpecifierSet

from kvgeom import actions, releases, tree

EVERY = [str(release) for release in STACK.lock.releases]
OLDER = [release for release in EVERY if release != RELEASE]
PRS = ["page-geometry", "draft-pool-page", "page-geometry-check", "req-rows", "attention-tables"]

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
    "test_minimax_captured_bound": (">=0.5.22", "a verify is captured at its own lengths"),
    "test_minimax_nvfp4_plan": (">=0.5.23", "no NVFP4 backend"),
    "test_minimax_nvfp4_plan_stays_in_what_msa_indexes": (">=0.5.23", "no NVFP4 backend"),
    "test_minicpm_refuses_a_short_context": (">=0.5.19", "no MiniCPM backend"),
    "test_trtllm_mha_fp4_prefill_rows": (">=0.5.21", "no FP4 prefill"),
    "test_qsa_graph": (">=0.5.20", "no QSA backend"),
    "test_xpu_graph": (">=0.5.20", "no speculation in XPU graphs"),
    "test_ascend_graph_without_host_lengths": (">=0.5.23", "a replay needs host lengths"),
}

# Minutes each, and on the newest release: a sweep of its class (tree, chain, block, n-gram) stays.
LONG = {"test_eagle3", "test_standalone", "test_frozen_kv_mtp", "test_dspark"}

# Cheap tests that fail without the edits, and what they say.
RED = {
    "test_drained_locs_are_exactly_the_loc_space": "has no attribute 'loc_space'",
    "test_scale_is_the_allocators_own_widening": "2 != 1",
    "test_frozen_kv_draft_keeps_its_placeholder": "512 != 64",
    "test_a_draft_paged_as_scheduled_does_not_boot": "PageGeometryError not raised",
    "test_a_row_one_column_short_does_not_boot": "PageGeometryError not raised",
    "test_names_request_position_row_page_and_reserve": "PageGeometryError not raised",
    "test_every_algorithm": "entries of other rows that were overwritten",
    "test_fa_graph": "Lists differ: [4, 4] != [0, 0]",
    "test_triton_draft_indices": "Lists differ: [((5, 384), 0, 56)] != []",
    "test_verify_mask": "896 not greater than or equal to 928",
}


def patched(release: str, root: Path, *, edits: int) -> Path:
    """A hard-linked copy of a release with every file that the PRs add, and the edits of the first
    `edits` PRs."""
    linked_copy(releases.tree(release), root)
    prs = [
        pr if at < edits else dataclasses.replace(pr, edits=())
        for at, pr in enumerate(map(STACK.pr, PRS))
    ]
    part = dataclasses.replace(STACK, prs=tuple(prs))
    actions.apply(part, tree.find(root), dry_run=False, wait_s=5, say=lambda text: None)
    return root


def runnable(release: str, *pr_ids: str) -> dict[str, str]:
    """The tests of some PRs that this release can run, and their node ids."""
    can = {name for name, (when, _) in ONLY.items() if release in SpecifierSet(when)}
    nodes = node_ids(*pr_ids)
    return {n: at for n, at in nodes.items() if n not in LONG and (n not in ONLY or n in can)}


def run(release: str, root: Path, edits: int, nodes: dict[str, str]) -> dict[str, str | None]:
    before = releases.import_path(release)
    found = outcomes(patched(release, root, edits=edits), nodes.values(), before=before)
    shutil.rmtree(root)
    return found


@pytest.mark.parametrize("release", EVERY)
def test_applies_and_comes_off_byte_for_byte(release, tmp_path):
    root = linked_copy(releases.tree(release), tmp_path / "tree")
    found, before = tree.find(root), snapshot(root)
    quiet = {"wait_s": 5, "say": lambda text: None}
    made = actions.apply(STACK, found, dry_run=False, **quiet)
    for pr in made.prs:
        for path in (p for p in pr.steps if p.endswith(".py")):
            compile(found.path(path).read_bytes(), path, "exec")
    assert snapshot(root) != before
    actions.revert(STACK, found, **quiet)
    after = {p: seen for p, seen in snapshot(root).items() if not p.startswith("sglang/.kvgeom")}
    assert after == before


def test_the_left_out_tests_exist():
    assert {*ONLY, *LONG, *RED} <= node_ids(*PRS).keys()


@pytest.mark.parametrize("release", OLDER)
def test_green_with_the_stack_red_without(release, tmp_path):
    """Three trees, two at a time: all edits, no edits, and those of the first PR, which the tests
    of the later ones need to say what they themselves lack."""
    green = runnable(release, *PRS)
    red = {name: green[name] for name in RED}
    first = node_ids(PRS[0])
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run, release, tmp_path / "all", len(PRS), green),
            pool.submit(run, release, tmp_path / "one", 1, {n: red[n] for n in red.keys() - first}),
            pool.submit(
                run, release, tmp_path / "none", 0, {n: red[n] for n in red.keys() & first}
            ),
        ]
        with_all, with_one, with_none = (job.result() for job in jobs)
    assert {name: said for name, said in with_all.items() if said} == {}
    assert with_all.keys() == green.keys()
    for name, said in {**with_one, **with_none}.items():
        assert said and RED[name] in said, f"{name} on {release}: {(said or 'passes')[-1500:]}"
