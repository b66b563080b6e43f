"""The commands as a user runs them: what they print, where, and their exit status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, kvgeom_checkout, make_tree, snapshot

POOLS_FILE = "sglang/srt/mem_cache/pools.py"


@pytest.fixture
def run(little, tmp_path):
    """run(arguments) -> the finished process, with the little series; run.root is the tree."""
    stack, root = little
    (tmp_path / "checkout").mkdir()
    command = kvgeom_checkout(tmp_path / "checkout", stack.root)

    def call(*arguments: str, tree: Path | None = root) -> subprocess.CompletedProcess:
        where = ["--tree", str(tree)] if tree else []
        done = subprocess.run([*command, *arguments, *where], capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done

    call.root, call.command = root, command
    return call


def test_the_way_through(run):
    before = snapshot(run.root)
    done = run("status")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines() == [
        f"SGLang 0.5.23 in {run.root / 'sglang'}",
        "Series: not applied",
        "one  not applied  [mem_cache] One page",
        "two  not applied  [mem_cache] Wider rows",
    ]
    done = run("apply", "--dry-run")
    assert done.returncode == 0 and "would change 3 files" in done.stdout
    assert "one  to apply  2 files" in done.stdout
    assert snapshot(run.root) == before
    done = run("apply")
    assert done.returncode == 0 and "one  applied  2 files" in done.stdout
    assert done.stdout.endswith(": 3 files changed\n")
    done = run("status")
    assert "Series: applied" in done.stdout and "two  applied" in done.stdout
    assert "already applied, nothing changed" in run("apply").stdout
    assert "3 files are as SGLang 0.5.23 has them" in run("revert").stdout
    assert snapshot(run.root) == before
    assert "not applied, nothing to revert" in run("revert").stdout


def test_json(run):
    found = json.loads(run("status", "--json").stdout)
    assert found["release"] == "0.5.23" and found["supported"] is True
    assert [p["state"] for p in found["prs"]] == ["not applied"] * 2
    assert {e["state"] for p in found["prs"] for e in p["edits"]} == {"to apply"}
    dry = json.loads(run("apply", "--dry-run", "--json").stdout)
    assert dry["dry_run"] is True and dry["prs"][0]["state"] == "to apply"
    made = json.loads(run("apply", "--json").stdout)
    assert made["result"] == ["3 files changed"] and len(made["files"]) == 3
    assert json.loads(run("status", "--json").stdout)["state"] == "applied"
    (run.root / POOLS_FILE).write_text("x = 1\n")
    found = json.loads(run("status", "--json").stdout)
    assert found["changed_by_others"] == [f"python/{POOLS_FILE}"]


def test_a_refusal_is_two_lines_on_stderr(run):
    run("apply")
    (run.root / POOLS_FILE).write_text("x = 1\n")
    for verb in ("apply", "revert"):
        done = run(verb)
        assert done.returncode == 1 and done.stdout == ""
        first, second = done.stderr.splitlines()
        assert first.startswith("kvgeom: error: ") and f"python/{POOLS_FILE}" in first
        assert second.startswith("kvgeom: `pip install --force-reinstall")
    done = run("status")
    assert done.returncode == 1
    assert f"  changed by somebody else: python/{POOLS_FILE}" in done.stdout


def test_status_tells_what_does_not_fit(run):
    text = (run.root / POOLS_FILE).read_text()
    (run.root / POOLS_FILE).write_text(text.replace("make_pool(size", "make_kv_pool(size"))
    done = run("status")
    assert done.returncode == 1 and "does not fit: " in done.stdout
    assert "near: line 23" in done.stdout


def test_wrong_arguments(run, tmp_path):
    done = run("status", tree=tmp_path / "none")
    assert done.returncode == 2 and "there is no such folder" in done.stderr
    assert run("diff", "--pr", "three").returncode == 2
    assert "its PRs: one, two" in run("diff", "--pr", "three").stderr
    assert run("sttus").returncode == 2
    assert run("apply", "--tre").returncode == 2


def test_an_unsupported_release(run, tmp_path):
    other = make_tree(tmp_path / "other", release="0.5.22")
    done = run("apply", tree=other)
    assert done.returncode == 1 and "supported: 0.5.23" in done.stderr
    done = run("status", tree=other)
    assert done.returncode == 1 and "not supported; 0.5.23 are" in done.stdout
    command = f"`kvgeom lock --tree {other / 'sglang'}` prints what differs here"
    assert command in done.stdout


def test_a_pr_that_is_not_for_this_release(run):
    toml = Path(run.command[-1]) / "series.toml"
    toml.write_text(toml.read_text() + 'when = "<0.5.20"\nabsent = "rows are wide there"\n')
    assert run("status").stdout.splitlines()[2:] == [
        "one  not applied  [mem_cache] One page",
        "two  absent: rows are wide there",
    ]
    found = json.loads(run("status", "--json").stdout)
    assert [p["state"] for p in found["prs"]] == ["not applied", "absent"]
    assert [p["absent"] for p in found["prs"]] == [None, "rows are wide there"]
    assert "two  absent   0 files" in run("apply").stdout
    assert "two  absent: rows are wide there" in run("status").stdout


def git_apply(root: Path, diff: str, folder: Path) -> dict[str, tuple]:
    """The package after `git apply` of a diff on a fresh copy of the tree's own files."""
    make_tree(folder / "python")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn"], cwd=folder, input=diff, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return snapshot(folder / "python/sglang")


def test_the_diff_is_what_apply_does(run, tmp_path):
    whole = run("diff").stdout
    one, two = (run("diff", "--pr", p).stdout for p in ("one", "two"))
    assert whole.startswith("diff --git a/python/sglang/srt/geometry/pages.py")
    run("apply")
    assert run("diff").stdout == whole and run("diff", "--pr", "two").stdout == two
    patched = {k: v for k, v in snapshot(run.root / "sglang").items() if ".kvgeom" not in k}
    assert git_apply(run.root, whole, tmp_path / "whole") == patched
    assert git_apply(run.root, one + two, tmp_path / "stack") == patched


def test_a_diff_of_odd_line_ends(run, tmp_path):
    """A file without a last newline, and one of ours without one."""
    rows = run.root / "sglang/srt/mem_cache/rows.py"
    rows.write_text(rows.read_text().rstrip("\n"))
    diff = run("diff").stdout
    assert diff.count("\\ No newline at end of file") == 2
    make_tree(tmp_path / "odd/python")
    (tmp_path / "odd/python/sglang/srt/mem_cache/rows.py").write_bytes(rows.read_bytes())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "odd", check=True)
    subprocess.run(["git", "apply"], cwd=tmp_path / "odd", input=diff, text=True, check=True)
    run("apply")
    odd = tmp_path / "odd/python/sglang/srt/mem_cache/rows.py"
    assert odd.read_bytes() == rows.read_bytes()


def test_a_reader_that_goes_away(run):
    command = [*run.command, "diff", "--tree", str(run.root)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.close()
    assert running.stderr.read() == b""
    running.stderr.close()
    running.wait()


def test_colours_only_on_a_terminal(run):
    ours, theirs = pty.openpty()
    command = [*run.command, "diff", "--pr", "two", "--tree", str(run.root)]
    subprocess.run(command, stdout=theirs, check=True)
    os.close(theirs)
    assert b"\x1b[32m+" in os.read(ours, 65536)
    assert "\x1b" not in run("diff").stdout


def test_lock(run, tmp_path):
    assert run("lock").stdout == "series.lock agrees with this tree\n"
    other = make_tree(tmp_path / "other", release="0.5.24")
    done = run("lock", tree=other)
    assert done.returncode == 1 and done.stdout.count(" 0.5.24: - -> ") == 3
    assert run("apply", tree=other).returncode == 1
    done = run("lock", "--update", tree=other)
    assert done.returncode == 0 and "3 lines written" in done.stdout
    assert run("apply", tree=other).returncode == 0
    assert run("apply").returncode == 0


def test_help_and_version(run):
    done = run("--help", tree=None)
    assert done.returncode == 0 and "Exit status" in done.stdout
    verbs = ("status", "apply", "revert", "diff", "doctor", "lock", "plan", "boot", "releases")
    for verb in verbs:
        assert "Example" in run(verb, "--help", tree=None).stdout
    assert run("--version", tree=None).stdout == "kvgeom 0.1.0\n"


def test_the_command_line_loads_nothing_heavy():
    program = "import sys, kvgeom.cli; print({'libcst', 'torch', 'sglang'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr
