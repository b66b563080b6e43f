"""The stack on every released SGLang: it applies and comes off byte for byte, and the tests that it
adds to SGLang pass with it and fail without it. The newest release runs the whole set, in
test_in_tree.py; the older ones leave out what they lack and the long sweeps."""

from __future__ import annotations

import shutil

import pytest
from conftest import RELEASE, import_path, linked_copy, snapshot
from in_tree import IDS, LONG, ONLY, PRS, STACK, Tree, node_ids
from packaging.specifiers import SpecifierSet
from test_in_tree import RED as NEWEST_RED

from kvgeom import actions, tree
from kvgeom.plan import Plan

EVERY = [str(release) for release in STACK.lock.releases]
OLDER = [release for release in EVERY if release != RELEASE]

# Cheap tests that fail without the edits, what they say (one of several), and on which releases.
RED = {
    "test_drained_locs_are_exactly_the_loc_space": ("has no attribute 'loc_space'", ""),
    "test_scale_is_the_allocators_own_widening": ("2 != 1", ""),
    "test_frozen_kv_draft_keeps_its_placeholder": ("512 != 64", ""),
    "test_a_draft_paged_as_scheduled_does_not_boot": ("PageGeometryError not raised", ""),
    "test_a_row_one_column_short_does_not_boot": ("PageGeometryError not raised", ""),
    "test_names_request_position_row_page_and_reserve": ("PageGeometryError not raised", ""),
    "test_every_algorithm": ("rows that were overwritten|exceeds req_to_token row width", ""),
    "test_fa_graph": ("Lists differ: [", ""),
    "test_triton_draft_indices": ("Lists differ: [((5, 384), 0, 56)] != []", ""),
    "test_tokenspeed_mla_graph": ("Lists differ: [1, 1] != [0, 0]", "<0.5.23"),
    "test_verify_mask": ("896 not greater than or equal to 928", ""),
    "test_every_slot_comes_back": ("index 64 is out of bounds", "==0.5.17"),
    "test_a_window_draft_follows_the_windows_slots": ("index 104 is out of bounds", ">=0.5.18"),
    "test_qsa_index_keys_follow_every_slot": ("index 13 is out of bounds", ">=0.5.22"),
    "test_a_draft_pool_of_physical_rows_does_not_boot": ("PageGeometryError not raised", ""),
    "test_each_runner_of_a_multi_layer_draft_has_a_pool": (" delta (", ""),
    "test_dspark_is_admitted": ("does not support speculative decoding yet", "==0.5.17"),
}


def runnable(release: str, *pr_ids: str) -> dict[str, str]:
    """The tests of some PRs that this release can run, and their node ids."""
    nodes = node_ids(*pr_ids, release=release)
    return {name: at for name, at in nodes.items() if name not in LONG}


@pytest.fixture(scope="module")
def made(request) -> Plan:
    """The plan of the stack on a release, for each test of that release."""
    return actions.planned(STACK, tree.find(import_path(request.param)[0]), None)


@pytest.mark.parametrize("made", EVERY, indirect=True)
def test_applies_and_comes_off_byte_for_byte(made, tmp_path, monkeypatch):
    monkeypatch.setattr(actions, "planned", lambda *_: made)
    root = linked_copy(import_path(str(made.release))[0], tmp_path / "tree")
    found, before = tree.find(root), snapshot(root)
    quiet = {"wait_s": 5, "say": lambda text: None}
    actions.apply(STACK, found, dry_run=False, **quiet)
    for pr in made.prs:
        for path in (p for p in pr.steps if p.endswith(".py")):
            compile(found.path(path).read_bytes(), path, "exec")
    assert snapshot(root) != before
    actions.revert(STACK, found, **quiet)
    after = {p: seen for p, seen in snapshot(root).items() if not p.startswith("sglang/.kvgeom")}
    assert after == before


def test_the_left_out_tests_exist():
    assert {*ONLY, *LONG, *RED} <= node_ids(*PRS).keys()


@pytest.mark.parametrize("made", OLDER, indirect=True)
def test_green_with_the_stack_red_without(made, tmp_path):
    """Three states, with every file that the stack adds: no edits, those of the first PR, which the
    tests of the later ones need to say what they themselves lack, and all edits."""
    release = str(made.release)
    green = runnable(release, *PRS)
    red = {name: green[name] for name, (_, when) in RED.items() if release in SpecifierSet(when)}
    first = red.keys() & node_ids(PRS[0])
    folder, *before = import_path(release)
    sglang = Tree(folder, tmp_path / release, made, before)
    for edited, names in ((0, first), (1, red.keys() - first)):
        sglang.become(edited=edited, added=len(IDS))
        for name, said in sglang.outcomes(red[name] for name in names).items():
            words, _ = RED[name]
            known = said and any(part in said for part in words.split("|"))
            assert known, f"{name} on {release}: {(said or 'passes')[-1500:]}"
    sglang.become(edited=len(IDS), added=len(IDS))
    found = sglang.outcomes(green.values())
    assert {name: said for name, said in found.items() if said} == {}
    assert found.keys() == green.keys()
    shutil.rmtree(sglang.root)


@pytest.mark.parametrize("pr_id", PRS)
def test_series_toml_says_where_a_pr_has_a_red_case(pr_id):
    mine = [SpecifierSet(when) for name, (_, when) in RED.items() if name in node_ids(pr_id)]
    red = [release for release in OLDER if any(release in when for when in mine)]
    red += [RELEASE] if NEWEST_RED[pr_id] else []
    assert [r for r in EVERY if r in (STACK.pr(pr_id).red or SpecifierSet("==0"))] == red
