"""The stack as commits on a new branch of an SGLang checkout, one a PR.

Commits are made in git's object store alone: the work tree, the index and the current branch stay
as they are. The branch is created last, so that it is there as a whole or not at all.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvgeom import actions
from kvgeom.errors import KvgeomError
from kvgeom.plan import Plan, PrPlan
from kvgeom.series import Series
from kvgeom.tree import Tree

Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was made. `commits`: (PR id, commit) in stack order; `left_out`: (PR id, why)."""

    base: str
    branch: str
    commits: list[tuple[str, str]]
    left_out: list[tuple[str, str]]


class Git:
    """git in one checkout, with an index of our own."""

    def __init__(self, checkout: Path, index: Path):
        self.checkout = checkout
        self.env = {**os.environ, "GIT_INDEX_FILE": str(index)}

    def __call__(self, *args: str, given: bytes = b"", own_index: bool = True) -> str:
        """The output of a git command, stripped; KvgeomError with git's own words."""
        command = ["git", "-C", str(self.checkout), *args]
        try:
            done = subprocess.run(
                command, input=given, capture_output=True, check=False,
                env=self.env if own_index else None,
            )  # fmt: skip
        except OSError as error:
            raise KvgeomError(f"git cannot be run: {error.strerror}", "install git") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip() or "no message"
            raise KvgeomError(
                f"git {args[0]} failed in {self.checkout}: {said}", "nothing was changed"
            )
        return done.stdout.decode(errors="replace").strip()


def export(series: Series, tree: Tree, branch: str, bodies: Path | None, say: Say) -> Exported:
    """Make `branch` at HEAD plus one commit a PR, and the PR texts in the folder `bodies`.

    KvgeomError, and the checkout is as it was, where anything is not right.
    """
    if tree.checkout is None:
        raise KvgeomError(
            f"{tree.package} is not in a git checkout of SGLang",
            "clone SGLang's repository and check out a release tag or main",
            exit_code=2,
        )
    with tempfile.TemporaryDirectory(prefix="kvgeom-") as folder:
        git = Git(tree.checkout, Path(folder, "index"))
        _check_checkout(git, tree, branch)
        say("planning")
        made = _plan(series, tree)
        base = git("rev-parse", "HEAD")
        git("read-tree", base)
        parent, commits = base, []
        for pr in made.prs:
            if pr.steps:
                say(f"commit {pr.pr.id}")
                parent = _commit(git, pr, parent)
                commits.append((pr.pr.id, parent))
        if not commits:
            raise KvgeomError(f"nothing to export: SGLang {tree.release} has the whole series")
        if bodies is not None:
            _write_bodies(series, [pr_id for pr_id, _ in commits], bodies)
        git("update-ref", f"refs/heads/{branch}", parent, "0" * len(parent))  # a new one
    left_out = [(pr.pr.id, _why_left_out(pr, tree)) for pr in made.prs if not pr.steps]
    return Exported(base, branch, commits, left_out)


def _check_checkout(git: Git, tree: Tree, branch: str) -> None:
    if tree.state.exists():
        raise KvgeomError(
            f"the series is applied in place in {tree.package}",
            f"run `kvgeom revert --tree {tree.checkout}` first",
        )
    changed = git("status", "--porcelain", "--untracked-files=no", own_index=False)
    if changed:
        paths = [line[2:].strip() for line in changed.splitlines()]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        raise KvgeomError(
            f"{tree.checkout} has changes that are not committed: {', '.join(paths[:3])}{more}",
            "commit or stash them, then run the command again",
        )
    git("check-ref-format", "--branch", branch)
    if git("for-each-ref", f"refs/heads/{branch}"):
        raise KvgeomError(
            f"{tree.checkout} has a branch {branch} already",
            f"name another with --branch, or remove it: git branch -D {branch}",
        )
    git("var", "GIT_AUTHOR_IDENT")  # says how to set user.name and user.email


def _plan(series: Series, tree: Tree) -> Plan:
    made = actions.planned(series, tree, None)
    actions.check_plan(made)
    if tree.release not in series.lock.releases:
        _check_drift(series, made)
    return made


def _check_drift(series: Series, made: Plan) -> None:
    """Between releases, the code around the edits has to be that of the newest release."""
    newest = series.lock.releases[-1]
    drifted = [
        f"{file}: edit '{edit}'"
        for (file, edit), digest in sorted(made.digests.items())
        if series.lock.digest(file, edit, newest) not in (digest, None)
    ]
    if drifted:
        raise KvgeomError(
            f"SGLang {made.release} is not a reviewed release, and the code around "
            f"{len(drifted)} edits is not that of {newest}; nothing was changed\n  "
            + "\n  ".join(drifted),
            "review them there, or check out a release: "
            + ", ".join(f"v{release}" for release in series.lock.releases),
        )


def _commit(git: Git, pr: PrPlan, parent: str) -> str:
    """One PR on top of `parent`, in the index and the object store."""
    entries = []
    for path, (before, after) in sorted(pr.changes.items()):
        blob = git("hash-object", "-w", "--stdin", "--path", path, given=after)
        entries.append(f"{_mode(git, path) if before is not None else '100644'} {blob}\t{path}\n")
    git("update-index", "--add", "--index-info", given="".join(entries).encode())
    message = f"{pr.pr.title}\n\n{pr.pr.body.strip()}\n"
    # Headings of the body start with "#": git must not take them for comments.
    return git("commit-tree", git("write-tree"), "-p", parent, "-F", "-", given=message.encode())


def _mode(git: Git, path: str) -> str:
    return git("ls-files", "--stage", "--", path).split()[0]


def _why_left_out(pr: PrPlan, tree: Tree) -> str:
    if not pr.pr.live(tree.release):
        return f"absent: {pr.pr.absent}"
    return str(pr.state)


def _write_bodies(series: Series, ids: list[str], folder: Path) -> None:
    """The PR texts as Markdown files, each with its place in the stack."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, pr_id in enumerate(ids, start=1):
            pr = series.pr(pr_id)
            below = f"on top of {', '.join(ids[: number - 1])}; " if number > 1 else ""
            (folder / f"{number:02}-{pr_id}.md").write_text(
                f"# {pr.title}\n\n"
                f"PR {number} of {len(ids)}: {below}only the last commit is new. "
                f"Merge order: {', '.join(ids)}.\n\n{pr.body.strip()}\n",
                "utf-8",
            )
    except OSError as error:
        raise KvgeomError(
            f"--bodies {folder}: {error.filename or folder}: {error.strerror}; no branch was made",
            "name a folder that can be written",
            exit_code=2,
        ) from None
