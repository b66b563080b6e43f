"""What `kvgeom boot` prints: a live line per step, the table, the refusals, the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvgeom.boot_checks import Claim, Row, failure, rank_differences, table
from kvgeom.cpu_engine import EngineReport

OnEvent = Callable[[str, str], None]
_PLAIN_SECONDS = 10.0  # between two lines about the same stage where there is no terminal


class Steps:
    """A line per step, known from the start: live on a terminal, else plain lines."""

    def __init__(self, console: Console, names: list[str]):
        self.console = console
        self.progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        width = max(map(len, names))
        self.tasks = {
            name: self.progress.add_task(name.ljust(width), total=1, start=False, detail="")
            for name in names
        }

    def __enter__(self) -> Steps:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    @contextmanager
    def step(self, name: str) -> Iterator[OnEvent]:
        """Runs one step; what it is given takes (stage, detail)."""
        task, told = self.tasks[name], _Told()
        self.progress.start_task(task)

        def on_event(stage: str, detail: str) -> None:
            text = detail if stage == name else f"{stage}: {detail}"
            self.progress.update(task, detail=text)
            if not self.console.is_terminal and told.is_news(stage):
                self.console.print(f"{name}: {text}", markup=False, soft_wrap=True)

        yield on_event
        self.progress.update(task, completed=1)


class _Told:
    """What the plain lines have said last."""

    def __init__(self) -> None:
        self.stage, self.at = "", 0.0

    def is_news(self, stage: str) -> bool:
        now = time.monotonic()
        if stage == self.stage and now - self.at < _PLAIN_SECONDS:
            return False
        self.stage, self.at = stage, now
        return True


def show_geometry(out: Console, patched: EngineReport) -> None:
    """The table of the first rank, and where another rank differs from the rest."""
    if not patched.geometry:
        return
    first = patched.geometry[0]
    shown = Table("", "size", "page", "rows", "indexed by", "reach", "covers", pad_edge=False)
    for row in table(first, patched.max_req_to_token_end):
        shown.add_row(*_cells(row))
    out.print(shown)
    out.print(
        "rows: what the structure has (req_to_token: the length of a row, and as size the context "
        "length); reach: the first index that is never used (req_to_token: the furthest column "
        "that this run wrote).",
        style="dim",
    )
    different = rank_differences(patched.geometry)
    for line in different:
        out.print(line, markup=False, soft_wrap=True)
    if not different:
        out.print(f"All {len(patched.geometry)} ranks have these figures.")


def _cells(row: Row) -> list[str]:
    covers = {True: "yes", False: "NO", None: ""}[row.covers]
    numbers = ["" if n is None else str(n) for n in (row.size, row.page, row.rows)]
    return [row.structure, *numbers, row.index, str(row.reach), covers]


def show_stop(out: Console, title: str, report: EngineReport) -> None:
    """What stopped a run that is meant to stop."""
    lines = [v.message for v in report.violations]
    if report.violations:
        lines = [lines[0], *([f"and {len(lines) - 1} more like it"] if len(lines) > 1 else [])]
    for line in [title, *(lines or [failure(report) or "nothing stopped it"])]:
        out.print(line if line is title else f"  {line}", markup=False, soft_wrap=True)


def show_summary(out: Console, claims: list[Claim]) -> None:
    """One line per claim."""
    width = max(len(c.step) for c in claims)
    for claim in claims:
        word = "[green]ok    [/green]" if claim.ok else "[bold red]FAILED[/bold red]"
        out.print(f"{word}  {claim.step.ljust(width)}  ", end="")
        out.print(claim.text, markup=False, soft_wrap=True)
