"""`kvgeom export`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def export(
    onto: Annotated[
        Path,
        typer.Option(
            "--onto", metavar="CHECKOUT", help="A clean git checkout of SGLang: a release or main."
        ),
    ],
    branch: Annotated[str, typer.Option(help="The new branch.")] = "kvgeom",
    bodies: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the PR texts there, one Markdown file a PR."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a script.")] = False,
) -> None:
    """Make a branch of an SGLang checkout with one commit a PR, ready for review.

    Example: `kvgeom export --onto ~/sglang --branch dcp-geometry --bodies bodies`

    The author is git's own (user.name, user.email). Work tree and current branch stay as they are:
    `git switch kvgeom` shows the stack, `git format-patch main..kvgeom` writes it as patches.
    Exit status 0 made; 1 refused and nothing changed; 2 wrong arguments.
    """
    from kvgeom import export as exporting
    from kvgeom import series
    from kvgeom import tree as trees

    out, err = Console(highlight=False), Console(stderr=True, highlight=False)

    def say(text: str) -> None:
        err.print(f"kvgeom: {text}", markup=False, soft_wrap=True)

    done = exporting.export(series.load(), trees.find(onto), branch, bodies, say)
    if as_json:
        print(json.dumps(asdict(done), indent=2))
        return
    lines = [f"{pr}  {commit[:12]}" for pr, commit in done.commits]
    lines += [f"{pr}  left out: {why}" for pr, why in done.left_out]
    lines.append(f"branch {done.branch}: {len(done.commits)} commits on {done.base[:12]}")
    lines += [f"PR texts in {bodies}"] if bodies else []
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
