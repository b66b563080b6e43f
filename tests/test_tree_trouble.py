"""Trees that cannot be read or written, damaged manifests, full disks, two writers at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import snapshot
from test_tree_apply import POOLS_FILE, apply, refused, revert, state

from kvgeom import actions, install, tree
from kvgeom.actions import TreeState
from kvgeom.errors import KvgeomError


def test_a_damaged_manifest_and_a_missing_original(little):
    stack, root = little
    apply(stack, root)
    manifest = root / "sglang/.kvgeom/manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[:50])
    assert "cannot be read" in refused(revert, stack, root).message
    manifest.write_text(json.dumps({"files": []}))
    assert "cannot be read" in refused(apply, stack, root).message
    manifest.write_text(text)
    (root / "sglang/.kvgeom/originals/python" / POOLS_FILE).write_text("x = 1\n")
    error = refused(revert, stack, root)
    assert "missing or damaged" in error.message and "--force-reinstall" in error.way_out


def as_nobody(action) -> str:
    """The error of an action as a user who owns nothing (root may write anywhere)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            action()
            text = "no error"
        except KvgeomError as err:
            text = f"{err.message} | {err.way_out}"
        except BaseException as err:
            text = repr(err)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def open_folders(tmp_path):
    """Another user may look into pytest's folders."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == Path(tmp_path).owner() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)


def test_a_read_only_tree(little, open_folders):
    stack, root = little
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o555)
    found = tree.find(root)
    before = snapshot(root)
    said = as_nobody(lambda: apply(stack, root))
    assert f"{found.package} cannot be written" in said and "owner of that installation" in said
    assert as_nobody(lambda: actions.status(stack, found)) == "no error"
    assert snapshot(root) == before


def test_one_folder_that_is_read_only(little, open_folders):
    stack, root = little
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o777)
    os.chmod(root / "sglang/srt/mem_cache", 0o555)
    before = snapshot(root)
    said = as_nobody(lambda: apply(stack, root))
    assert f"{root / 'sglang/srt/mem_cache'} cannot be written" in said
    assert snapshot(root) == before


def test_a_file_that_may_not_be_read(little, open_folders):
    stack, root = little
    (root / POOLS_FILE).chmod(0o000)
    said = as_nobody(lambda: actions.status(stack, tree.find(root)))
    assert f"{root / POOLS_FILE} cannot be read" in said


def test_a_full_disk_is_recovered_from(little, monkeypatch):
    stack, root = little
    pristine = snapshot(root)
    real, calls = os.replace, []

    def full(source, target):
        calls.append(target)
        if len(calls) == 5:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(KvgeomError, match="No space left on device; the run was cut short"):
        apply(stack, root)
    monkeypatch.undo()
    assert state(stack, root) is TreeState.HALF
    revert(stack, root)
    assert snapshot(root) == pristine


def test_the_manifest_is_written_before_the_first_file(little, monkeypatch):
    stack, root = little
    real, order = os.replace, []
    monkeypatch.setattr(os, "replace", lambda s, t: (order.append(Path(t).name), real(s, t)))
    apply(stack, root)
    first = order.index("manifest.json")
    assert order[:first] == ["pools.py", "rows.py"]  # the originals
    assert sorted(order[first + 1 : -1]) == ["pages.py", "pools.py", "rows.py"]
    assert order[-1] == "manifest.json"


def test_a_second_writer_waits_and_then_refuses(little):
    stack, root = little
    found, told = tree.find(root), []
    with install.locked(found, 1, lambda: None):
        before = snapshot(root)
        with pytest.raises(KvgeomError, match="another kvgeom has been working"):
            actions.apply(stack, found, dry_run=False, wait_s=0.2, say=told.append)
        assert snapshot(root) == before
    assert told == ["waiting for another kvgeom"]
    assert not found.state.exists()
    assert apply(stack, root) == ["3 files changed"]
