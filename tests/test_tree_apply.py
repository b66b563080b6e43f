"""Apply and revert on little trees: what they leave behind, and what they refuse."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from conftest import linked_copy, make_series, make_tree, snapshot

from kvgeom import actions, tree
from kvgeom.actions import TreeState
from kvgeom.errors import KvgeomError

POOLS_FILE = "sglang/srt/mem_cache/pools.py"


def apply(stack, root: Path) -> list[str]:
    said: list[str] = []
    actions.apply(stack, tree.find(root), dry_run=False, wait_s=1, say=said.append)
    return said


def revert(stack, root: Path) -> list[str]:
    said: list[str] = []
    actions.revert(stack, tree.find(root), wait_s=1, say=said.append)
    return said


def state(stack, root: Path) -> TreeState:
    return actions.status(stack, tree.find(root)).state


def refused(action, *args) -> KvgeomError:
    """The refusal of an action, which must write nothing and must say a way out."""
    before = snapshot(args[1])
    with pytest.raises(KvgeomError) as caught:
        action(*args)
    assert snapshot(args[1]) == before
    assert caught.value.way_out and caught.value.exit_code == 1
    return caught.value


def test_there_and_back(little):
    stack, root = little
    pristine = snapshot(root)
    assert state(stack, root) is TreeState.NOT_APPLIED
    assert apply(stack, root) == ["3 files changed"]
    assert state(stack, root) is TreeState.APPLIED
    patched = snapshot(root)
    assert b"return pages.PAGE" in patched[POOLS_FILE][1]
    assert patched["sglang/srt/geometry/pages.py"][0] & 0o777 == 0o644
    assert patched["sglang/srt/mem_cache/rows.py"][0] & 0o777 == 0o755
    assert not any("test_pages" in name for name in patched)
    changed = [n for n in pristine if patched[n] != pristine[n]]
    assert sorted(changed) == [POOLS_FILE, "sglang/srt/mem_cache/rows.py"]
    assert revert(stack, root) == ["3 files are as SGLang 0.5.23 has them"]
    assert snapshot(root) == pristine
    assert state(stack, root) is TreeState.NOT_APPLIED


def test_twice_changes_nothing(little):
    stack, root = little
    apply(stack, root)
    before, times = snapshot(root), os.stat(root / POOLS_FILE).st_mtime_ns
    assert apply(stack, root) == ["already applied, nothing changed"]
    assert snapshot(root) == before and os.stat(root / POOLS_FILE).st_mtime_ns == times
    revert(stack, root)
    before = snapshot(root)
    assert revert(stack, root) == ["not applied, nothing to revert"]
    assert snapshot(root) == before


def test_status_and_dry_run_write_nothing(little):
    stack, root = little
    before = snapshot(root)
    made = actions.apply(stack, tree.find(root), dry_run=True, wait_s=1, say=lambda text: None)
    actions.status(stack, tree.find(root))
    assert len(made.changes) == 3 and snapshot(root) == before


def test_revert_gives_back_the_times_that_compiled_files_go_by(little):
    stack, root = little
    os.utime(root / POOLS_FILE, ns=(10**18, 10**18))
    apply(stack, root)
    assert os.stat(root / POOLS_FILE).st_mtime_ns != 10**18
    revert(stack, root)
    assert os.stat(root / POOLS_FILE).st_mtime_ns == 10**18


def test_a_linked_cache_is_not_written_through(little, tmp_path):
    stack, cache = little
    before = snapshot(cache)
    root = linked_copy(cache, tmp_path / "linked")
    apply(stack, root)
    assert snapshot(cache) == before
    revert(stack, root)
    assert snapshot(root) == before == snapshot(cache)


def test_compiled_forms_of_added_files_go_and_others_files_stay(little):
    stack, root = little
    apply(stack, root)
    folder = root / "sglang/srt/geometry"
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/pages.cpython-311.pyc").write_bytes(b"x")
    revert(stack, root)
    assert not folder.exists()
    apply(stack, root)
    (folder / "mine.py").write_text("x = 1\n")
    revert(stack, root)
    assert [p.name for p in folder.iterdir()] == ["mine.py"]


def test_a_tree_that_does_not_fit(little):
    stack, root = little
    text = (root / POOLS_FILE).read_text()
    (root / POOLS_FILE).write_text(text.replace("make_pool(size", "make_kv_pool(size"))
    (root / "sglang/srt/mem_cache/rows.py").unlink()
    error = refused(apply, stack, root)
    assert "2 problems, nothing was written" in error.message
    assert "edit 'check'" in error.message and "rows.py: SGLang has no such file" in error.message


def test_an_unsupported_release(little, tmp_path):
    stack, _ = little
    root = make_tree(tmp_path / "other", release="0.5.22")
    error = refused(apply, stack, root)
    assert "SGLang 0.5.22" in error.message and error.way_out == "supported: 0.5.23"
    found = actions.status(stack, tree.find(root))
    assert not found.supported and not found.sound


def test_a_foreign_change_to_a_patched_file(little):
    stack, root = little
    apply(stack, root)
    with open(root / POOLS_FILE, "a") as file:
        file.write("# mine\n")
    assert state(stack, root) is TreeState.CHANGED
    for action in (apply, revert):
        error = refused(action, stack, root)
        assert "changed by somebody else" in error.message
        assert f"python/{POOLS_FILE}" in error.message
        assert "pip install --force-reinstall --no-deps sglang==0.5.23" in error.way_out
    shutil.copy(root / "sglang/.kvgeom/originals/python" / POOLS_FILE, root / POOLS_FILE)
    assert state(stack, root) is TreeState.REINSTALLED
    assert apply(stack, root) == ["3 files changed"]
    assert state(stack, root) is TreeState.APPLIED


def test_a_foreign_change_to_an_added_file(little):
    stack, root = little
    apply(stack, root)
    added = root / "sglang/srt/geometry/pages.py"
    added.write_text("PAGE = 1\n")
    error = refused(revert, stack, root)
    assert "geometry/pages.py" in error.message and f"remove {added}" in error.way_out
    added.unlink()
    revert(stack, root)
    assert state(stack, root) is TreeState.NOT_APPLIED


def test_reinstalled_over_an_applied_series(little, tmp_path):
    stack, root = little
    pristine = snapshot(root)
    apply(stack, root)
    fresh = make_tree(tmp_path / "fresh")
    shutil.copytree(fresh / "sglang", root / "sglang", dirs_exist_ok=True)
    assert state(stack, root) is TreeState.REINSTALLED
    revert(stack, root)
    assert snapshot(root) == pristine


@pytest.mark.parametrize("also_supported", [True, False])
def test_upgraded_under_an_applied_series(little, tmp_path, also_supported):
    stack, root = little
    apply(stack, root)
    shutil.rmtree(root / "sglang-0.5.23.dist-info")
    new = make_tree(tmp_path / "new", release="0.5.24", pools="x = 1\n")
    shutil.copytree(new, root, dirs_exist_ok=True)
    found = actions.status(stack, tree.find(root))
    assert found.state is TreeState.UPGRADED and "another file" not in str(found.plan.problems)
    if also_supported:
        key = next(iter(stack.lock.entries))
        stack.lock.entries[key]["0.5.24"] = "x"
        error = refused(apply, stack, root)
        assert "applied to SGLang 0.5.23" in error.message and "0.5.24 now" in error.message
        assert "kvgeom revert" in error.way_out
    assert "cleared what was left" in revert(stack, root)[0]
    assert snapshot(root) == snapshot(new)


def test_a_patched_file_that_outlived_an_upgrade(little):
    stack, root = little
    apply(stack, root)
    (root / "sglang-0.5.23.dist-info").rename(root / "sglang-0.5.24.dist-info")
    (root / "sglang-0.5.24.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.24\n")
    error = refused(revert, stack, root)
    assert "--force-reinstall --no-deps sglang==0.5.24" in error.way_out


def test_another_version_of_the_series(little, tmp_path):
    stack, root = little
    pristine = snapshot(root)
    apply(stack, root)
    newer = make_series(tmp_path / "newer")
    newer.file("python/sglang/srt/geometry/pages.py", "PAGE = 128\n")
    text = (tmp_path / "newer/series.toml").read_text()
    newer.toml(text.replace("pages.py", "wide_pages.py", 1))
    (tmp_path / "newer/python/sglang/srt/geometry/pages.py").rename(
        tmp_path / "newer/python/sglang/srt/geometry/wide_pages.py"
    )
    newer = newer.review(tree.find(make_tree(tmp_path / "fresh")))
    assert state(newer, root) is TreeState.OTHER_SERIES
    assert apply(newer, root) == [
        "taking back the other version of the series first",
        "3 files changed",
    ]
    geometry = root / "sglang/srt/geometry"
    assert [p.name for p in geometry.iterdir()] == ["wide_pages.py"]
    assert state(newer, root) is TreeState.APPLIED
    revert(newer, root)
    assert snapshot(root) == pristine


def test_another_version_that_does_not_fit_leaves_the_first_in_place(little, tmp_path):
    stack, root = little
    apply(stack, root)
    newer = make_series(tmp_path / "newer").load()
    key = next(iter(stack.lock.entries))
    newer.lock.entries[key] = {"0.5.23": "never seen"}
    newer.prs[0].files["python/sglang/srt/geometry/pages.py"] = b"PAGE = 3\n"
    error = refused(apply, newer, root)
    assert "does not fit" in error.message
    assert state(stack, root) is TreeState.APPLIED
