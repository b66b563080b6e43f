"""A kill at every step of apply and revert, two runs at once, and what recovers from them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from conftest import kvgeom_checkout, make_series, make_tree, snapshot
from test_tree_apply import apply, revert, state

from kvgeom import install, tree
from kvgeom.actions import TreeState
from kvgeom.install import FileState

STEPS = ("replace", "unlink", "rmdir", "mkdir", "fsync", "fchmod", "utime")


def killed_at(step: int, action) -> bool:
    """Runs `action` in a child that dies before its file operation number `step`."""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(real):
            def call(*args, **keys):
                nonlocal count
                count += 1
                if count == step:
                    os._exit(9)
                return real(*args, **keys)

            return call

        for name in STEPS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            action()
            os._exit(0)
        except BaseException as err:  # pytest must not go on in the child
            os.write(2, repr(err).encode())
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def recover_from_every_kill(stack, start: Path, action, tmp_path: Path) -> dict[TreeState, int]:
    """Kill `action` on copies of `start` at each step; apply and revert must both recover."""
    applied = shutil.copytree(start, tmp_path / "applied")
    apply(stack, applied)
    pristine = shutil.copytree(start, tmp_path / "pristine")
    revert(stack, pristine)
    whole, none = snapshot(applied), snapshot(pristine)
    seen: dict[TreeState, int] = {}
    step = 0
    while True:
        step += 1
        root = shutil.copytree(start, tmp_path / f"step{step}")
        alive = not killed_at(step, lambda root=root: action(stack, root))
        before = snapshot(root)
        found = state(stack, root)
        assert snapshot(root) == before  # status looks and touches nothing
        seen[found] = seen.get(found, 0) + 1
        manifest = install.read_manifest(tree.find(root))
        if manifest:
            files = install.file_states(tree.find(root), manifest)
            assert FileState.FOREIGN not in files.values()
        else:
            own = {n: f for n, f in before.items() if ".kvgeom" not in n}
            assert own == none and found is TreeState.NOT_APPLIED
        other = shutil.copytree(root, tmp_path / f"other{step}", symlinks=True)
        apply(stack, root)
        assert different(snapshot(root), whole) == [], step
        assert state(stack, root) is TreeState.APPLIED
        revert(stack, root)
        assert different(snapshot(root), none) == [], step
        revert(stack, other)
        assert different(snapshot(other), none) == [], step
        shutil.rmtree(root)
        shutil.rmtree(other)
        if alive:
            return seen


def different(left: dict, right: dict) -> list[str]:
    """The names that differ, but for the manifest, which holds times."""
    names = left.keys() | right.keys()
    out = sorted(n for n in names if left.get(n) != right.get(n))
    return [n for n in out if n != "sglang/.kvgeom/manifest.json"]


@pytest.fixture
def no_disk(monkeypatch):
    """A kill loses nothing that was written; only a power cut needs the syncs."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def test_a_kill_at_every_step_of_apply(little, tmp_path, no_disk):
    stack, root = little
    seen = recover_from_every_kill(stack, root, apply, tmp_path)
    assert seen[TreeState.HALF] > 15 and seen[TreeState.NOT_APPLIED] > 10
    assert seen[TreeState.APPLIED] >= 1


def test_a_kill_at_every_step_of_revert(little, tmp_path, no_disk):
    stack, root = little
    apply(stack, root)
    seen = recover_from_every_kill(stack, root, revert, tmp_path)
    assert seen[TreeState.HALF] > 10 and seen[TreeState.NOT_APPLIED] >= 1


def test_a_kill_while_another_version_is_taken_back(little, tmp_path, no_disk):
    stack, root = little
    older = make_series(tmp_path / "older")
    older.file("python/sglang/srt/geometry/pages.py", "PAGE = 8\n")
    older = older.review(tree.find(root))
    apply(older, root)
    seen = recover_from_every_kill(stack, root, apply, tmp_path)
    assert seen[TreeState.HALF] > 20


@pytest.fixture
def commands(little, tmp_path) -> tuple[list[str], Path]:
    """The command line of the tool with the little series, and the tree."""
    stack, root = little
    (tmp_path / "checkout").mkdir()
    return kvgeom_checkout(tmp_path / "checkout", stack.root), root


def start(command: list[str], *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_at_once(commands, little):
    """Whatever the order, each ends well and the tree is whole; then the same for revert."""
    command, root = commands
    stack, _ = little
    pristine = snapshot(root)
    for verb, want in (("apply", TreeState.APPLIED), ("revert", TreeState.NOT_APPLIED)):
        running = [start(command, verb, "--tree", str(root)) for _ in range(2)]
        out = [p.communicate(timeout=120) for p in running]
        assert [p.returncode for p in running] == [0, 0], out
        assert state(stack, root) is want
        assert any("nothing" in text for text, _ in out), out
    assert snapshot(root) == pristine


def test_apply_and_revert_at_once_never_mix(commands, little):
    command, root = commands
    stack, _ = little
    pristine = snapshot(root)
    apply(stack, root)
    whole = snapshot(root)
    for _ in range(2):
        running = [start(command, verb, "--tree", str(root)) for verb in ("apply", "revert")]
        out = [p.communicate(timeout=120) for p in running]
        assert [p.returncode for p in running] == [0, 0], out
        now = snapshot(root)
        assert different(now, whole) == [] or now == pristine
    revert(stack, root)
    assert snapshot(root) == pristine


def test_a_process_waits_for_the_one_before_it(commands, little):
    command, root = commands
    with install.locked(tree.find(root), 1, lambda: None):
        running = start(command, "apply", "--tree", str(root))
        time.sleep(0.1)
        assert running.stderr.readline() == "kvgeom: waiting for another kvgeom (up to 30 s)\n"
        assert snapshot(root)["sglang/srt/mem_cache/pools.py"][1].count(b"PAGE") == 0
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0 and "3 files changed" in out, err


def test_a_killed_process_leaves_its_lock_free(commands, little, tmp_path):
    command, root = commands
    holder = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from kvgeom import install, tree\n"
        "with install.locked(tree.find(Path(sys.argv[2])), 1, lambda: None):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    running = subprocess.Popen(
        [command[0], "-c", holder, command[3], str(root)], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "held\n"
    running.kill()
    running.wait()
    assert apply(little[0], root) == ["3 files changed"]
    assert make_tree(tmp_path / "same") and state(little[0], root) is TreeState.APPLIED
