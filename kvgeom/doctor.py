"""`kvgeom doctor`: is this installation sound, is that server affected, and what to do."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvgeom.errors import KvgeomError


def doctor(
    tree: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            show_default="that of the process, else the installed SGLang",
            help="Folder that contains `sglang/`.",
        ),
    ] = None,
    pid: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="A running server: its own process.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A server's log, from its start.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a script.")] = False,
) -> None:
    """Tell whether an installation is sound and a server is affected, and what to do. Never writes.

    Example: `kvgeom doctor --pid $(pgrep -f 'sglang serve' | head -1)`

    A server is judged by its arguments, an installation by its files. Nothing of SGLang is
    imported. Exit status: 0 sound, or not affected; 1 affected, or something needs your attention;
    2 wrong arguments (no such process, a log without a server's start, ...).
    """
    from kvgeom import diagnosis, launch, running, series
    from kvgeom import tree as trees

    if pid and log:
        raise KvgeomError("--pid and --log exclude each other", "give one", exit_code=2)
    err = Console(stderr=True, highlight=False)
    started = launch.from_process(pid) if pid else launch.from_log(log) if log else None
    copy = running.served_copy(pid) if pid and not tree else None
    since = running.started_at(pid) if pid and not copy else None
    place = tree or copy or (running.sglang_folder(pid) if pid else None)
    notes = list(started.notes) if started else []
    if copy:
        notes.append("kvgeom's plugin serves it this copy")
    if pid and not place:
        notes.append(f"which SGLang process {pid} runs cannot be told from here; --tree names it")
    if log and not tree:
        notes.append("a log does not tell which SGLang wrote it; --tree names another")
    waiting = err.status("reading SGLang") if err.is_terminal else nullcontext()
    with waiting:
        found = diagnosis.make(series.load(), trees.find(place), started, since)
    where = f" --tree {found.tree.package}" if place and found.command.startswith("kvgeom") else ""
    command = found.command + where
    if as_json:
        print(json.dumps(diagnosis.as_json(found, command, notes), indent=2))
    else:
        for line in diagnosis.lines(found, command, notes):
            print(line)
    raise typer.Exit(found.exit_code)
