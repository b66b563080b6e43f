"""status, apply, revert, diff on one tree: what each may do, what it says when it may not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kvgeom import install, plan
from kvgeom.errors import KvgeomError
from kvgeom.install import FileState, Manifest, Stage
from kvgeom.plan import Plan, PrState
from kvgeom.series import Series
from kvgeom.tree import Tree, check_writable

Say = Callable[[str], None]


class TreeState(StrEnum):
    NOT_APPLIED = "not applied"
    APPLIED = "applied"
    HALF = "half-applied"
    OTHER_SERIES = "applied, by another version of the series"
    CHANGED = "applied, then changed by somebody else"
    REINSTALLED = "applied, then SGLang was reinstalled over it"
    UPGRADED = "applied to another release, then SGLang was replaced"


@dataclass(frozen=True)
class Status:
    """What `kvgeom status` tells. `files`: the state of every file that an apply changed."""

    tree: Tree
    state: TreeState
    manifest: Manifest | None
    files: dict[str, FileState]
    plan: Plan
    supported: bool

    @property
    def foreign(self) -> list[str]:
        return [p for p, s in self.files.items() if s is FileState.FOREIGN]

    @property
    def sound(self) -> bool:
        """Whether nothing needs the user's attention."""
        calm = self.state in (TreeState.NOT_APPLIED, TreeState.APPLIED)
        return calm and self.supported and not self.plan.problems

    def pr_state(self, pr: plan.PrPlan) -> str:
        """Where a PR stands on the tree as it is now."""
        if pr.state is not PrState.NOT_APPLIED or self.state is TreeState.NOT_APPLIED:
            return str(pr.state)
        if self.state in (TreeState.APPLIED, TreeState.HALF):
            return str(self.state)
        return "see above"


def status(series: Series, tree: Tree) -> Status:
    """Never writes."""
    manifest = install.read_manifest(tree)
    state, files = inspect(series, tree, manifest)
    planned_on = manifest
    if state is TreeState.UPGRADED:  # of the old release, only the files we added may be left
        added = {p: e for p, e in manifest.files.items() if e.before is None}
        planned_on = replace(manifest, files=added)
    made = planned(series, tree, planned_on)
    return Status(tree, state, manifest, files, made, tree.release in series.lock.releases)


def inspect(
    series: Series, tree: Tree, manifest: Manifest | None
) -> tuple[TreeState, dict[str, FileState]]:
    """Where the tree stands, by its manifest, and every file that the manifest names."""
    if manifest is None:
        return TreeState.NOT_APPLIED, {}
    files = install.file_states(tree, manifest)
    if manifest.release != str(tree.release):
        return TreeState.UPGRADED, files
    if FileState.FOREIGN in files.values():
        return TreeState.CHANGED, files
    if manifest.stage is not Stage.APPLIED:
        return TreeState.HALF, files
    if FileState.BEFORE in files.values():
        return TreeState.REINSTALLED, files
    same = manifest.series == series.id
    return TreeState.APPLIED if same else TreeState.OTHER_SERIES, files


def planned(series: Series, tree: Tree, manifest: Manifest | None) -> Plan:
    """The plan from SGLang's own files, whatever is applied now."""
    return plan.make(
        series,
        lambda path: install.original(tree, manifest, path),
        tree.release,
        writes=tree.writes,
        check_lock=tree.release in series.lock.releases,
    )


def check_supported(series: Series, tree: Tree) -> None:
    if tree.release not in series.lock.releases:
        known = ", ".join(map(str, series.lock.releases)) or "none yet"
        raise KvgeomError(
            f"SGLang {tree.release} in {tree.package} is not a release that the series supports",
            f"supported: {known}",
        )


def check_plan(made: Plan) -> None:
    if made.problems:
        count = len(made.problems)
        raise KvgeomError(
            f"the series does not fit this SGLang {made.release}: "
            f"{count} problem{'s' * (count > 1)}, nothing was written\n  "
            + "\n  ".join(map(str, made.problems)),
            "if this is SGLang's own release, untouched, the series needs an update; else "
            "install that release again",
        )


def _refuse_changed(tree: Tree, manifest: Manifest, files: dict[str, FileState]) -> None:
    """Raises where a file differs from what SGLang had and from what apply wrote."""
    foreign = [p for p, s in files.items() if s is FileState.FOREIGN]
    if not foreign:
        return
    own = [p for p in foreign if manifest.files[p].before is not None]
    added = [p for p in foreign if manifest.files[p].before is None]
    ways = [tree.reinstall(own) + ", then run the command again"] if own else []
    ways += [f"remove {' '.join(str(tree.path(p)) for p in added)}"] if added else []
    raise KvgeomError(
        f"changed by somebody else since the series was applied: {', '.join(foreign)}; "
        "nothing was written",
        "; ".join(ways) + " (keep a copy of the change if you need it)",
    )


def _refuse_upgraded(tree: Tree, manifest: Manifest, way_out: str) -> None:
    raise KvgeomError(
        f"the series was applied to SGLang {manifest.release}, "
        f"and {tree.package} is {tree.release} now",
        way_out,
    )


def apply(series: Series, tree: Tree, *, dry_run: bool, wait_s: float, say: Say) -> Plan:
    """Apply the series, or finish an apply that was interrupted. Raises with nothing written."""
    check_supported(series, tree)
    if dry_run:
        made, _, _ = _ready_to_apply(series, tree)
        return made
    with _guarded(tree), install.locked(tree, wait_s, lambda: say("waiting for another kvgeom")):
        made, state, manifest = _ready_to_apply(series, tree)
        if state is TreeState.APPLIED:
            say("already applied, nothing changed")
            return made
        check_writable(tree, list(made.changes))
        if manifest and manifest.series != series.id:
            say("taking back the other version of the series first")
            install.revert(tree, manifest)
        elif state is TreeState.HALF:
            say("finishing an interrupted run")
        if made.changes:
            install.apply(tree, series.id, made.changes)
        say(f"{len(made.changes)} files changed" if made.changes else "nothing to apply")
        return made


def _ready_to_apply(series: Series, tree: Tree) -> tuple[Plan, TreeState, Manifest | None]:
    manifest = install.read_manifest(tree)
    state, files = inspect(series, tree, manifest)
    if state is TreeState.UPGRADED:
        _refuse_upgraded(tree, manifest, "run `kvgeom revert`, which clears what is left, first")
    if state is TreeState.CHANGED:
        _refuse_changed(tree, manifest, files)
    made = planned(series, tree, manifest)
    check_plan(made)
    return made, state, manifest


def revert(series: Series, tree: Tree, *, wait_s: float, say: Say) -> None:
    """Bring SGLang's own files back byte for byte. Raises with nothing written."""
    if install.read_manifest(tree) is None and not tree.state.exists():
        say("not applied, nothing to revert")
        return
    with _guarded(tree), install.locked(tree, wait_s, lambda: say("waiting for another kvgeom")):
        manifest = install.read_manifest(tree)
        if manifest is None:
            say("not applied, nothing to revert")
            return
        state, files = inspect(series, tree, manifest)
        check_writable(tree, list(manifest.files))
        if state is TreeState.UPGRADED:
            own = [p for p, e in manifest.files.items() if e.before is not None]
            patched = [p for p in own if files[p] is FileState.AFTER]
            if patched:
                way_out = tree.reinstall(patched) + ", then run `kvgeom revert` again"
                _refuse_upgraded(tree, manifest, way_out)
            install.forget(tree, manifest)
            say(f"cleared what was left of the series for SGLang {manifest.release}")
            return
        _refuse_changed(tree, manifest, files)
        install.revert(tree, manifest)
        say(f"{len(manifest.files)} files are as SGLang {tree.release} has them")


class _guarded:
    """Turns an OSError of the writing into a sentence; the manifest keeps it recoverable."""

    def __init__(self, tree: Tree):
        self.tree = tree

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise KvgeomError(
                f"{error.filename or self.tree.package}: {error.strerror}; the run was cut short",
                "remove the cause, then `kvgeom apply` finishes or `kvgeom revert` undoes it",
            ) from None


def diff(series: Series, tree: Tree, pr_id: str | None) -> Iterator[str]:
    """A unified diff of what apply changes, or of one PR's part in the order of the stack."""
    manifest = install.read_manifest(tree)
    if manifest and manifest.release != str(tree.release):
        _refuse_upgraded(tree, manifest, "run `kvgeom revert`, which clears what is left, first")
    check_supported(series, tree)
    chosen = series.pr(pr_id) if pr_id else None
    made = planned(series, tree, manifest)
    check_plan(made)
    changes = made.changes
    if chosen:
        changes = next(p.changes for p in made.prs if p.pr is chosen)
    for path, (before, after) in sorted(changes.items()):
        yield from _file_diff(path, before, after)


def _file_diff(path: str, before: bytes | None, after: bytes) -> Iterator[str]:
    yield f"diff --git a/{path} b/{path}\n"
    if before is None:
        yield "new file mode 100644\n"
    old, new = _lines(before or b""), _lines(after)
    from_name = "/dev/null" if before is None else f"a/{path}"
    for line in difflib.unified_diff(old, new, from_name, f"b/{path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(data: bytes) -> list[str]:
    """Lines as git counts them: split at line feeds only, each kept."""
    text = data.decode("utf-8", "surrogateescape")
    return [line for line in text.replace("\n", "\n\0").split("\0") if line]
