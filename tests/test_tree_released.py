"""The repository's own series on the installed SGLang: there and back, and nothing else touched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RELEASE, REPOSITORY, linked_copy
from conftest import snapshot as read_snapshot
from packaging.version import Version
from test_tree_apply import apply, revert
from test_tree_kill import killed_at

from kvgeom import actions, series, skeleton, tree
from kvgeom.actions import TreeState
from kvgeom.errors import KvgeomError
from kvgeom.plan import Plan, PrState
from kvgeom.source import Source

STACK = series.load(REPOSITORY)
EDITED = sorted({e.file for pr in STACK.prs for e in pr.edits_for(Version(RELEASE))})


@pytest.fixture
def root(released, tmp_path) -> Path:
    """The release as hard links: a write through one would show in `released`."""
    return linked_copy(released, tmp_path / "site")


@pytest.fixture(scope="session", autouse=True)
def the_release_is_not_written_through(released):
    before = read_snapshot(released, _digest)
    yield
    assert read_snapshot(released, _digest) == before


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


_READ: dict[tuple, bytes] = {}


def snapshot(root: Path) -> dict[str, tuple]:
    """`conftest.snapshot`, which reads the files that many trees link to once for all of them."""

    def read(path: Path) -> bytes:
        stat = path.stat()
        key = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
        if stat.st_nlink == 1:
            return path.read_bytes()
        if key not in _READ:
            _READ[key] = path.read_bytes()
        return _READ[key]

    return read_snapshot(root, read)


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvgeom.cli", *arguments, "--tree", str(root)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def plan(released) -> Plan:
    """The stack on the release, whatever is applied: it is planned from the saved originals."""
    return actions.planned(STACK, tree.find(released), None)


def test_there_and_back(root, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(actions, "planned", lambda *_: plan)  # the command makes its own
    pristine = snapshot(root)
    diff = run(root, "diff").stdout
    assert snapshot(root) == pristine
    apply(STACK, root)
    found = actions.status(STACK, tree.find(root))
    assert found.state is TreeState.APPLIED and found.sound
    states = {found.pr_state(p) for p in found.plan.prs}
    others = {"already upstream", "absent", "not applicable"}
    assert "applied" in states and states <= {"applied", *others}

    patched = snapshot(root)
    changed = {n for n in patched if ".kvgeom" not in n and patched[n] != pristine.get(n)}
    files = {p.removeprefix("python/") for p in found.manifest.files}
    folders = {f"sglang/{f}" for f in found.manifest.folders}
    assert changed == files | folders
    for name in files:
        compile(patched[name][1], name, "exec", dont_inherit=True)
        if name in pristine:
            assert patched[name][0] == pristine[name][0]

    apply(STACK, root)
    assert snapshot(root) == patched
    assert run(root, "diff").stdout == diff

    checkout = tmp_path / "checkout"
    before = {n: pristine[n] for n in files if n in pristine}
    for name, (_, data) in before.items():
        target = checkout / "python" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    subprocess.run(["git", "apply"], cwd=checkout, input=diff, text=True, check=True)
    for name in files:
        assert (checkout / "python" / name).read_bytes() == patched[name][1]

    revert(STACK, root)
    assert snapshot(root) == pristine


def test_the_diffs_of_the_prs_make_the_whole(plan):
    at: dict[str, bytes | None] = {}
    for pr in plan.prs:
        for path, (before, after) in pr.changes.items():
            assert at.get(path, before) == before
            at[path] = after
    assert at == {path: after for path, (_, after) in plan.changes.items()}


def test_every_pr_has_something_to_do_here(plan):
    states = {p.pr.id: p.state for p in plan.prs}
    assert not {PrState.APPLIED, PrState.PARTLY} & {*states.values()}
    assert PrState.NOT_APPLIED in states.values()


def test_the_lock_agrees_with_the_release(root):
    assert run(root, "lock").stdout == "series.lock agrees with this tree\n"


@pytest.mark.parametrize("file", EDITED)
def test_what_is_parsed_prints_back(released, file):
    raw = (released / file.removeprefix("python/")).read_bytes()
    edits = [e for pr in STACK.prs for e in pr.edits if e.file == file]
    assert Source.parse(raw, edits).module.bytes == skeleton.of(raw, edits)


@pytest.mark.parametrize("steps_a_file", [0.1, 1, 6, 8])
def test_a_kill_on_the_release(root, plan, steps_a_file, monkeypatch):
    monkeypatch.setattr(actions, "planned", lambda *_: plan)
    pristine = snapshot(root)
    step = max(1, int(steps_a_file * len(plan.changes)))
    assert killed_at(step, lambda: apply(STACK, root))
    found = actions.status(STACK, tree.find(root))
    assert (found.state is TreeState.HALF) == (found.manifest is not None)
    if steps_a_file > 5:  # writing the new files beside the old ones takes five each
        assert found.state is TreeState.HALF
        apply(STACK, root)
        assert actions.status(STACK, tree.find(root)).state is TreeState.APPLIED
    revert(STACK, root)
    assert snapshot(root) == pristine


def release_as(root: Path, version: str) -> None:
    """The same code under another release's name."""
    info = next(root.glob("sglang-*.dist-info"))
    text = (info / "METADATA").read_text().split("\n")
    text = [f"Version: {version}" if line.startswith("Version:") else line for line in text]
    os.rename(info, root / f"sglang-{version}.dist-info")
    (root / f"sglang-{version}.dist-info/METADATA").unlink()
    (root / f"sglang-{version}.dist-info/METADATA").write_text("\n".join(text))


@pytest.mark.parametrize("version", ["0.5.15", "0.9.0"])
def test_a_release_that_nobody_reviewed(root, version):
    release_as(root, version)
    before = snapshot(root)
    with pytest.raises(KvgeomError, match=f"SGLang {version} .* not a release") as caught:
        apply(STACK, root)
    assert "0.5.23" in caught.value.way_out
    assert snapshot(root) == before


def test_every_edited_file_changed_by_an_update_is_told(root):
    """Code that the series has not seen, in every file at once: all of it is reported."""
    for file in EDITED:
        path = root / file.removeprefix("python/")
        text = path.read_text()
        path.unlink()
        path.write_text(
            text.replace("    def ", "    def renamed_").replace("\ndef ", "\ndef new_")
        )
    before = snapshot(root)
    with pytest.raises(KvgeomError, match="nothing was written") as caught:
        apply(STACK, root)
    assert snapshot(root) == before
    for pr in STACK.prs:
        for edit in pr.edits_for(Version(RELEASE)):
            # An anchor in the module itself, an import, is still what it was.
            if edit.op not in ("define", "import") and edit.scopes != ("",):
                assert f"{edit.file}: edit '{edit.id}'" in caught.value.message


def test_a_patched_package_may_be_copied_elsewhere(root, plan, monkeypatch):
    monkeypatch.setattr(actions, "planned", lambda *_: plan)
    apply(STACK, root)
    shutil.copytree(root / "sglang", root / "moved" / "sglang")
    status = run(root / "moved" / "sglang", "status", "--json")
    assert json.loads(status.stdout)["state"] == "applied"
