"""`kvgeom export` onto a git checkout that holds the real release."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RELEASE, linked_installation, snapshot

from kvgeom import actions, series
from kvgeom import tree as trees

STACK = series.load()
IDENTITY = {
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "gc.auto", "GIT_CONFIG_VALUE_0": "0",
    "GIT_CONFIG_KEY_1": "core.compression", "GIT_CONFIG_VALUE_1": "0",  # time is dearer than space
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}  # fmt: skip


def git(where: Path, *args: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["git", "-C", str(where), *args], capture_output=True, text=True, input=given,
        env={**os.environ, **IDENTITY},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def kvgeom(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "kvgeom.cli", "export", *args], capture_output=True, text=True,
        env={**os.environ, **IDENTITY, **env}, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A checkout with the release as its only commit, tagged."""
    root = tmp_path_factory.mktemp("released") / "sglang"
    linked_installation(root / "python")
    git(root, "init", "-q", "-b", "main")
    git(root, "config", "user.name", "A Reviewer")
    git(root, "config", "user.email", "reviewer@example.org")
    (root / ".gitignore").write_text("__pycache__/\n*.dist-info/\n_version.py\n")
    git(root, "add", "python/sglang", ".gitignore")
    git(root, "commit", "-q", "-m", "The release")
    git(root, "tag", f"v{RELEASE}")
    return root


@pytest.fixture(scope="module")
def clone(released, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    git(folder, "clone", "-q", "--local", str(released), "sglang")
    return folder / "sglang"


@pytest.fixture
def checkout(clone) -> Path:
    """A clone of it, to be changed: it is put back before the next test."""
    put_back(clone)
    for key, value in (("name", "A Reviewer"), ("email", "reviewer@example.org")):
        git(clone, "config", f"user.{key}", value)
    git(clone, "config", "user.useConfigOnly", "false")
    return clone


def put_back(clone: Path) -> None:
    git(clone, "checkout", "-q", "--force", "-B", "main", f"v{RELEASE}")
    git(clone, "clean", "-fdqx")
    for branch in git(clone, "branch", "--format=%(refname:short)").split():
        if branch != "main":
            git(clone, "branch", "-q", "-D", branch)


def state(checkout: Path) -> tuple:
    return (git(checkout, "for-each-ref"), git(checkout, "symbolic-ref", "HEAD"),
            git(checkout, "status", "--porcelain"))  # fmt: skip


@pytest.fixture(scope="module")
def exported(released, tmp_path_factory) -> dict:
    before, bodies = state(released), tmp_path_factory.mktemp("bodies") / "new"
    done = kvgeom("--onto", str(released), "--branch", "topic/dcp", "--bodies", str(bodies),
                  "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "before": before, "bodies": bodies, "root": released}


def test_one_commit_a_pr_in_stack_order(exported):
    root = exported["root"]
    assert [pr for pr, _ in exported["commits"]] == [
        pr.id for pr in STACK.prs if pr.id not in dict(exported["left_out"])
    ]
    log = git(root, "log", "--reverse", "--format=%H", f"v{RELEASE}..topic/dcp").split()
    assert log == [commit for _, commit in exported["commits"]]
    for pr_id, commit in exported["commits"]:
        pr = STACK.pr(pr_id)
        assert git(root, "log", "-1", "--format=%s", commit) == pr.title
        assert git(root, "log", "-1", "--format=%b", commit) == pr.body.strip()
        assert git(root, "log", "-1", "--format=%an <%ae>", commit) == (
            "A Reviewer <reviewer@example.org>"
        )


def test_work_tree_and_branch_stay_as_they_are(exported):
    refs, head, status = state(exported["root"])
    added = [line for line in refs.splitlines() if line not in exported["before"][0].splitlines()]
    assert [line.split("\t")[1] for line in added] == ["refs/heads/topic/dcp"]
    assert (head, status) == exported["before"][1:]


def test_every_commit_compiles_and_has_its_files(exported):
    root = exported["root"]
    for pr_id, commit in exported["commits"]:
        changed = git(root, "diff", "--name-only", f"{commit}^", commit).splitlines()
        for path in (p for p in changed if p.endswith(".py")):
            compile(git(root, "show", f"{commit}:{path}"), path, "exec")
        assert set(STACK.pr(pr_id).files) <= set(changed)


def test_a_commit_is_what_apply_makes_up_to_there(exported, checkout):
    for pr_id, commit in (exported["commits"][1], exported["commits"][-1]):
        put_back(checkout)
        actions.apply(STACK.upto(pr_id), trees.find(checkout), dry_run=False, wait_s=0,
                      say=lambda text: None)  # fmt: skip
        refused(checkout, "the series is applied in place")
        shutil.rmtree(checkout / "python/sglang/.kvgeom")
        git(checkout, "add", "-A")
        made = git(checkout, "write-tree")
        assert made == git(exported["root"], "rev-parse", f"{commit}^{{tree}}"), pr_id


def test_patches_give_the_same_tree(exported, checkout, tmp_path):
    root = exported["root"]
    git(root, "format-patch", "-q", "-o", str(tmp_path / "patches"), f"v{RELEASE}..topic/dcp")
    patches = sorted(map(str, (tmp_path / "patches").iterdir()))
    assert len(patches) == len(exported["commits"])
    git(checkout, "am", "-q", *patches)
    assert git(checkout, "rev-parse", "HEAD^{tree}") == git(root, "rev-parse", "topic/dcp^{tree}")


def test_bodies_say_where_in_the_stack_they_are(exported):
    ids = [pr for pr, _ in exported["commits"]]
    files = sorted(exported["bodies"].iterdir())
    assert [f.name for f in files] == [f"{n:02}-{i}.md" for n, i in enumerate(ids, start=1)]
    for number, (pr_id, file) in enumerate(zip(ids, files, strict=True), start=1):
        text = file.read_text()
        assert text.startswith(f"# {STACK.pr(pr_id).title}\n") and STACK.pr(pr_id).body[:50] in text
        assert f"PR {number} of {len(ids)}: " in text and f"Merge order: {', '.join(ids)}." in text


def test_a_second_time(exported):
    before = state(exported["root"])
    done = kvgeom("--onto", str(exported["root"]), "--branch", "topic/dcp")
    assert done.returncode == 1 and "has a branch topic/dcp already" in done.stderr
    assert state(exported["root"]) == before


def refused(checkout: Path, sentence: str, *args: str, code: int = 1, **env: str) -> None:
    before, files = state(checkout), snapshot(checkout / "python/sglang/srt/mem_cache")
    done = kvgeom("--onto", str(checkout), *args, **env)
    assert (done.returncode, done.stdout) == (code, "") and "Traceback" not in done.stderr
    assert sentence in done.stderr
    assert state(checkout) == before
    assert snapshot(checkout / "python/sglang/srt/mem_cache") == files


def test_changes_that_are_not_committed(checkout):
    path = checkout / "python/sglang/srt/mem_cache/allocation.py"
    path.write_text(path.read_text() + "# mine\n")
    refused(checkout, "has changes that are not committed: python/sglang/srt/mem_cache/alloc")


def test_wrong_arguments(checkout, tmp_path):
    refused(checkout, "git check-ref-format failed", "--branch", "two words")
    refused(checkout, "there is no such folder", "--onto", str(tmp_path / "none"), code=2)
    (tmp_path / "file").write_text("")
    refused(checkout, "no branch was made", "--bodies", str(tmp_path / "file/x"), code=2)
    linked_installation(tmp_path / "plain")
    refused(checkout, "is not in a git checkout", "--onto", str(tmp_path / "plain"), code=2)


def test_nobody_to_be_the_author(checkout):
    for key in ("user.name", "user.email"):
        git(checkout, "config", "--unset", key)
    git(checkout, "config", "user.useConfigOnly", "true")
    refused(checkout, "user.email", EMAIL="")


def commit_on_main(checkout: Path, path: str, old: str, new: str) -> None:
    file = checkout / path
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    git(checkout, "commit", "-q", "-a", "-m", "Upstream goes on")


ALLOCATION = "python/sglang/srt/mem_cache/allocation.py"


def test_main_with_the_reviewed_code(checkout):
    commit_on_main(checkout, "python/sglang/srt/environ.py", "import os", "import  os")
    done = kvgeom("--onto", str(checkout), "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["branch"] == "kvgeom" and made["base"] == git(checkout, "rev-parse", "HEAD")
    assert len(made["commits"]) == len(STACK.prs) - len(made["left_out"])


def test_main_without_an_anchor(checkout):
    commit_on_main(checkout, ALLOCATION, "if num_needed_tokens > 0:", "if 0 < num_needed_tokens:")
    refused(checkout, "allocation.py")


def test_main_with_other_code_around_an_anchor(checkout):
    commit_on_main(checkout, ALLOCATION, "if num_needed_tokens > 0:",
                   "pass\n    if num_needed_tokens > 0:")  # fmt: skip
    around = [
        edit for pr in STACK.prs for edit in pr.edits
        if edit.file == ALLOCATION and "alloc_for_spec_decode" in edit.scopes
        and RELEASE in edit.when
    ]  # fmt: skip
    assert around
    refused(checkout, f"the code around {len(around)} edits is not that of {RELEASE}")
