"""What the command line makes of a status and of a plan: columns to read, and JSON."""

from __future__ import annotations

import itertools
from pathlib import Path

from packaging.version import Version
from rich.console import Console

from kvgeom.actions import Status
from kvgeom.plan import Plan, PrPlan, PrState


def print_status(out: Console, found: Status, supported: list[Version]) -> None:
    for line in status_lines(found, supported):
        out.print(line, markup=False, soft_wrap=True)


def status_lines(found: Status, supported: list[Version]) -> list[str]:
    package = found.tree.package
    note = "" if found.supported else f" (not supported; {', '.join(map(str, supported))} are)"
    lines = [f"SGLang {found.tree.release}{note} in {package}", f"Series: {found.state}"]
    lines += [f"  changed by somebody else: {path}" for path in found.foreign]
    if not found.supported:
        lines.append(f"`kvgeom lock --tree {package}` prints what differs here")
    lines += columns([_status_row(found, pr) for pr in found.plan.prs])
    return lines + [f"does not fit: {problem}" for problem in found.plan.problems]


def _status_row(found: Status, pr: PrPlan) -> tuple[str, ...]:
    if pr.state is PrState.ABSENT:
        return pr.pr.id, f"absent: {pr.pr.absent}"
    return pr.pr.id, found.pr_state(pr), pr.pr.title


def print_plan(out: Console, made: Plan, dry_run: bool) -> None:
    rows = [(pr.pr.id, _outcome(pr, dry_run), f"{len(pr.steps)} files") for pr in made.prs]
    for line in columns(rows):
        out.print(line, markup=False, soft_wrap=True)


def _outcome(pr: PrPlan, dry_run: bool) -> str:
    """What an apply makes of a PR."""
    return ("to apply" if dry_run else "applied") if pr.steps else str(pr.state)


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Cells in line, but for the last one of each row."""
    cells = itertools.zip_longest(*(row[:-1] for row in rows), fillvalue="")
    widths = [max(map(len, column)) for column in cells]
    lines = []
    for row in rows:
        padded = [f"{cell:{width}}" for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*padded, row[-1]]))
    return lines


def status_json(found: Status) -> dict:
    return {
        "tree": str(found.tree.package),
        "release": str(found.tree.release),
        "supported": found.supported,
        "state": str(found.state),
        "changed_by_others": found.foreign,
        "prs": [
            {
                "id": pr.pr.id,
                "title": pr.pr.title,
                "state": found.pr_state(pr),
                "absent": pr.pr.absent if pr.state is PrState.ABSENT else None,
                "edits": [
                    {"file": r.edit.file, "id": r.edit.id, "state": str(r.state)} for r in pr.edits
                ],
            }
            for pr in found.plan.prs
        ],
        "problems": [str(p) for p in found.plan.problems],
    }


def plan_json(made: Plan, package: Path, dry_run: bool, said: list[str]) -> dict:
    return {
        "tree": str(package),
        "release": str(made.release),
        "dry_run": dry_run,
        "result": said,
        "prs": [
            {"id": pr.pr.id, "state": _outcome(pr, dry_run), "files": sorted(pr.steps)}
            for pr in made.prs
        ],
        "files": sorted(made.changes),
    }
