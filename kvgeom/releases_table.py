"""The matrix release x PR, from plans on the code of the fetched releases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from packaging.version import Version

from kvgeom import actions, plan, releases, tree
from kvgeom.plan import PrState
from kvgeom.series import Series

# A release as it was published: code of ours that it holds already came from upstream.
_WORDS = {
    PrState.NOT_APPLIED: "applied",
    PrState.APPLIED: "upstream",
    PrState.UPSTREAM: "upstream",
    PrState.ABSENT: "absent",
}


@dataclass(frozen=True)
class Cell:
    """`red`: the PR's tests fail on that release without its edits."""

    state: str
    red: bool
    absent: str | None  # the reason


Matrix = dict[Version, dict[str, Cell]]  # release -> PR id -> cell


def matrix(series: Series, say: Callable[[Version], None]) -> Matrix:
    """Of every supported release; all are fetched. KvgeomError where the series does not fit."""
    out = {}
    for release in series.lock.releases:
        say(release)
        out[release] = {pr.pr.id: _cell(pr, release) for pr in _planned(series, release).prs}
    return out


def _planned(series: Series, release: Version) -> plan.Plan:
    """The whole stack, the tests that go into no package included."""
    found = tree.find(releases.tree(release))
    made = plan.make(series, lambda p: found.read(p) if found.writes(p) else None, release)
    actions.check_plan(made)
    return made


def _cell(pr: plan.PrPlan, release: Version) -> Cell:
    red = pr.pr.red is not None and pr.pr.red.contains(release, prereleases=True)
    reason = pr.pr.absent if pr.state is PrState.ABSENT else None
    return Cell(_WORDS[pr.state], red, reason)


def markdown(series: Series, cells: Matrix) -> str:
    """A table with a row per PR, and a line for each PR that a release goes without."""
    lines = [_row(["PR", *map(str, cells)]), _row(["---"] * (len(cells) + 1))]
    for pr in series.prs:
        row = [found[pr.id] for found in cells.values()]
        lines.append(_row([pr.id, *(c.state + ", red" * c.red for c in row)]))
    for pr in series.prs:
        absent = [str(r) for r, found in cells.items() if found[pr.id].absent]
        if absent:
            lines += ["", f"`{pr.id}` is absent from {', '.join(absent)}: {pr.absent}"]
    return "\n".join(lines) + "\n"


def _row(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"


def as_json(series: Series, cells: Matrix) -> dict:
    return {
        "releases": [str(release) for release in cells],
        "prs": [
            {
                "id": pr.id,
                "title": pr.title,
                "releases": {str(r): asdict(found[pr.id]) for r, found in cells.items()},
            }
            for pr in series.prs
        ],
    }
