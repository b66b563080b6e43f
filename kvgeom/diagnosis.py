"""What `kvgeom doctor` finds: an installation's status, a server's faults, one verdict."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass, field

from packaging.version import Version

from kvgeom import actions, cli_show, exposure, install, reviewed
from kvgeom.actions import Status, TreeState
from kvgeom.exposure import Finding, Grade
from kvgeom.launch import Launch
from kvgeom.plan import PrState
from kvgeom.series import Series
from kvgeom.tree import Tree

_PACKAGES = ("torch", "sglang-kernel", "flashinfer-python", "triton")
_SIZING = "python/sglang/srt/mem_cache/allocation_sizing.py"
_WAYS_OUT = {
    TreeState.HALF: "kvgeom apply",
    TreeState.OTHER_SERIES: "kvgeom apply",
    TreeState.REINSTALLED: "kvgeom apply",
    TreeState.CHANGED: "kvgeom revert",  # names the files and the way out
    TreeState.UPGRADED: "kvgeom revert",
}


@dataclass(frozen=True)
class Diagnosis:
    """`command` is what to run next, "" for nothing; `then` goes with it."""

    status: Status
    supported: list[Version]
    changed: list[str] | None  # files that are not as released; None: there is no record of them
    packages: dict[str, str | None]
    launch: Launch | None
    findings: list[Finding] = field(default_factory=list)
    verdict: str = ""
    command: str = ""
    then: str = ""
    exit_code: int = 0

    @property
    def has_plugin(self) -> bool:
        """Whether kvgeom's wheel is installed beside it."""
        return (self.tree.package.parent / "kvgeom.pth").is_file()

    @property
    def tree(self) -> Tree:
        return self.status.tree


def make(series: Series, tree: Tree, launch: Launch | None, since: float | None) -> Diagnosis:
    """`since`: when the server of `launch` started, in seconds since the epoch, where known."""
    changed = reviewed.changed_files(tree)
    status = reviewed.status(series, tree, changed) or actions.status(series, tree)
    facts = (status, series.lock.releases, changed, packages(tree), launch)
    if not status.sound:
        return Diagnosis(*facts, **_unsound(status))
    if launch is None:
        return Diagnosis(*facts, **_sound(status))
    if launch.served:
        verdict = "not affected: its log says that it started with the series"
        return Diagnosis(*facts, verdict=verdict)
    stale = status.state is TreeState.APPLIED and _is_older(tree, since)
    edits = {(e.file, e.id) for pr in series.prs for e in pr.edits_for(tree.release)}
    widened = _headroom_is_widened(status)
    found = exposure.findings(launch, _open(status, stale), edits, headroom_is_widened=widened)
    return Diagnosis(*facts, found, **_judged(status, found, stale))


def packages(tree: Tree) -> dict[str, str | None]:
    """The versions beside the tree, or else where this interpreter looks; None: missing."""
    path = [str(tree.package.parent), *sys.path]
    out = {}
    for name in _PACKAGES:
        found = next(iter(importlib.metadata.distributions(name=name, path=path)), None)
        out[name] = found.version if found else None
    return out


def _is_older(tree: Tree, since: float | None) -> bool:
    """Whether a server started before the series was applied, by more than the clocks differ."""
    written = (tree.state / "manifest.json").stat().st_mtime
    return since is not None and since < written - 2


def _open(status: Status, stale: bool) -> set[str]:
    """The PRs whose fault is in the code that runs."""
    closed = {PrState.UPSTREAM, PrState.ABSENT, PrState.APPLIED}
    return {
        pr.pr.id
        for pr in status.plan.prs
        if pr.state not in closed
        and (stale or status.state is TreeState.NOT_APPLIED)
        and pr.pr.red is not None
        and pr.pr.red.contains(status.tree.release, prereleases=True)
    }


def _headroom_is_widened(status: Status) -> bool:
    """Whether the release counts the DCP factor in the headroom: then it has this function."""
    own = install.original(status.tree, status.manifest, _SIZING)
    return b"def get_alloc_page_size(" in (own or b"")


def _unsound(status: Status) -> dict:
    release, package = status.tree.release, status.tree.package
    if not status.supported:
        verdict = f"not known: SGLang {release} is no release that the series was reviewed on"
        return {"verdict": verdict, "command": "kvgeom lock", "exit_code": 1}
    if status.state in _WAYS_OUT:
        verdict = f"needs attention: the series is {status.state} (SGLang {release} in {package})"
        return {"verdict": verdict, "command": _WAYS_OUT[status.state], "exit_code": 1}
    count = len(status.plan.problems)
    verdict = (
        f"needs attention: this SGLang {release} is not as released where the series changes it, "
        f"{count} problem{'s' * (count > 1)}"
    )
    return {"verdict": verdict, "command": "kvgeom status", "exit_code": 1}


def _sound(status: Status) -> dict:
    release = status.tree.release
    if status.state is TreeState.APPLIED:
        return {"verdict": f"sound: SGLang {release} with the series applied"}
    return {
        "verdict": f"sound: SGLang {release} as released; the series is not applied",
        "command": "kvgeom doctor --pid N",
        "then": "tells whether a server is affected",
    }


def _judged(status: Status, found: list[Finding], stale: bool) -> dict:
    release = status.tree.release
    hits = [f.pr for f in found if f.grade is Grade.HIT]
    perhaps = [f.pr for f in found if f.grade is Grade.MODEL]
    if not hits + perhaps:
        applied = status.state is TreeState.APPLIED and not stale
        why = "the series is applied" if applied else "its arguments reach no fault of the series"
        return {"verdict": f"not affected: on SGLang {release}, {why}"}
    how = "affected" if hits else "may be affected, depending on its model"
    verdict = f"{how}: on SGLang {release}, by what {_and(hits or perhaps)} would fix"
    if stale:
        return {
            "verdict": f"{verdict}; the series was applied after the server started",
            "command": "restart the server",
            "exit_code": 1,
        }
    then = "then restart the server"
    return {"verdict": verdict, "command": "kvgeom apply", "then": then, "exit_code": 1}


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def lines(found: Diagnosis, command: str, notes: list[str]) -> list[str]:
    """The text of a diagnosis, the verdict first."""
    status = found.status
    out = [found.verdict]
    if command:
        out.append(f"do: {command}" + (f"; {found.then}" if found.then else ""))
    if found.launch:
        out += ["", f"Server: {found.launch.source}: {found.launch}"]
        out += [f"  {f.pr} ({f.grade}): {f.text}" for f in found.findings]
    out += [f"  note: {note}" for note in notes]
    out += ["", *cli_show.status_lines(status, found.supported)]
    if found.has_plugin and status.state is TreeState.NOT_APPLIED:
        out.append("Plugin: servers started here get the series (KVGEOM_PLUGIN=0: off)")
    if found.changed:
        shown = ", ".join(found.changed[:5]) + ", ..." * (len(found.changed) > 5)
        out.append(f"not as SGLang released it: {len(found.changed)} files: {shown}")
    out += ["", *cli_show.columns([(n, v or "missing") for n, v in found.packages.items()])]
    return out


def as_json(found: Diagnosis, command: str, notes: list[str]) -> dict:
    launch = found.launch
    return {
        "verdict": found.verdict,
        "affected": found.exit_code == 1,
        "do": command,
        "notes": notes,
        "server": launch and {"source": launch.source, "arguments": str(launch)},
        "findings": [{"pr": f.pr, "grade": str(f.grade), "text": f.text} for f in found.findings],
        "plugin": found.has_plugin,
        "packages": found.packages,
        "not_as_released": found.changed,
        **cli_show.status_json(found.status),
    }
