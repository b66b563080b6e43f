"""The command line: `kvgeom status | apply | revert | diff | doctor | plan | boot | ...`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvgeom import __version__
from kvgeom.boot import boot
from kvgeom.doctor import doctor
from kvgeom.errors import KvgeomError
from kvgeom.export_cli import export
from kvgeom.plan_cli import plan
from kvgeom.releases_cli import fetched, releases

app = typer.Typer(
    name="kvgeom",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
out, err = Console(highlight=False), Console(stderr=True, highlight=False)

_WAIT_S = 30.0
TreeOption = Annotated[
    Path | None,
    typer.Option(
        "--tree",
        metavar="PATH",
        show_default="the installed SGLang",
        help="Folder that contains `sglang/` (site-packages, an unpacked wheel, a git checkout), "
        "or the `sglang` folder itself.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"kvgeom {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and exit.")
    ] = False,
) -> None:
    """One KV-cache page geometry for SGLang: a patch series, and the tool that applies it.

    Exit status: 0 done; 1 refused, and nothing was written (a file changed by somebody else, code
    that the series does not know, an unsupported release, ...); 2 wrong arguments.
    """


@app.command()
def status(tree: TreeOption = None, as_json: JsonOption = False) -> None:
    """Show the release and where each PR of the series stands. Never writes.

    Example: `kvgeom status --tree ~/venv/lib/python3.11/site-packages`

    Exit status 0 also when nothing is applied; 1 when something needs your attention.
    """
    from kvgeom import actions, cli_show, series
    from kvgeom import tree as trees

    stack, found_tree = series.load(), trees.find(tree)
    with _progress("reading SGLang"):
        found = actions.status(stack, found_tree)
    if as_json:
        print(json.dumps(cli_show.status_json(found), indent=2))
    else:
        cli_show.print_status(out, found, stack.lock.releases)
    raise typer.Exit(0 if found.sound else 1)


@app.command()
def apply(
    tree: TreeOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan everything, write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Apply the series to SGLang, in place and reversibly.

    Example: `kvgeom apply --dry-run`, then `kvgeom apply`

    Either everything fits and is written, or nothing is. Applying twice changes nothing. After a
    kill, `apply` finishes and `revert` undoes. Revert before you uninstall or upgrade SGLang.
    """
    from kvgeom import actions, cli_show, series
    from kvgeom import tree as trees

    stack, found = series.load(), trees.find(tree)
    said: list[str] = []
    with _progress("planning"):
        made = actions.apply(stack, found, dry_run=dry_run, wait_s=_WAIT_S, say=_say(said))
    if as_json:
        print(json.dumps(cli_show.plan_json(made, found.package, dry_run, said), indent=2))
        return
    cli_show.print_plan(out, made, dry_run)
    verb = f"would change {len(made.changes)} files" if dry_run else "; ".join(said)
    out.print(f"SGLang {found.release} in {found.package}: {verb}", markup=False, soft_wrap=True)


@app.command()
def revert(tree: TreeOption = None) -> None:
    """Bring SGLang's own files back, byte for byte.

    Example: `kvgeom revert`
    """
    from kvgeom import actions, series
    from kvgeom import tree as trees

    found, said = trees.find(tree), []
    with _progress("reverting"):
        actions.revert(series.load(), found, wait_s=_WAIT_S, say=_say(said))
    out.print(f"{found.package}: {'; '.join(said)}", markup=False, soft_wrap=True)


@app.command()
def diff(
    tree: TreeOption = None,
    pr: Annotated[
        str | None, typer.Option("--pr", metavar="ID", help="Only this PR, on top of those before.")
    ] = None,
) -> None:
    """Print what apply changes, as a unified diff that `git apply` takes.

    Example: `kvgeom diff --pr draft-pool-page | less`
    """
    from kvgeom import actions, series
    from kvgeom import tree as trees

    lines = actions.diff(series.load(), trees.find(tree), pr)
    colours = {"+": "32", "-": "31", "@": "36", "d": "1"} if sys.stdout.isatty() else {}
    stream = sys.stdout.buffer
    for line in lines:
        colour = colours.get(line[0])
        text = f"\x1b[{colour}m{line[:-1]}\x1b[0m\n" if colour else line
        stream.write(text.encode("utf-8", "surrogateescape"))
    stream.flush()


@app.command()
def lock(
    tree: TreeOption = None,
    release: Annotated[
        str | None,
        typer.Option(
            metavar="RELEASE", help="In place of a tree: this release, fetched into the cache."
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write series.lock for this tree's release.")
    ] = False,
) -> None:
    """Show where the code around the edits differs from what series.lock says was reviewed.

    Example: `kvgeom lock --release 0.5.24`; read the code that it names; then the same with
    `--update`, which makes it a supported release.

    Exit status 1 when something differs and was not written.
    """
    from kvgeom import review, series
    from kvgeom import tree as trees

    if tree and release:
        raise KvgeomError("--tree and --release exclude each other", "give one", exit_code=2)
    stack = series.load()
    found = trees.find(fetched(release) if release else tree)
    with _progress("reading SGLang"):
        drift = review.drift(stack, found, update=update)
    for line in drift:
        out.print(line, markup=False, soft_wrap=True)
    if not drift:
        print("series.lock agrees with this tree")
    elif update:
        print(f"series.lock: {len(drift)} lines written")
    raise typer.Exit(0 if update or not drift else 1)


def _say(said: list[str]):
    def say(text: str) -> None:
        said.append(text)
        if text.startswith("waiting"):
            err.print(f"kvgeom: {text} (up to {_WAIT_S:g} s)", markup=False)

    return say


@contextmanager
def _progress(text: str) -> Iterator[None]:
    with err.status(text) if err.is_terminal else _nothing():
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# From the first word that is no option of its own, all of it is SGLang's command.
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    plan
)
app.command()(doctor)
app.command()(boot)
app.command()(releases)
app.command()(export)


def main() -> None:
    """Entry point: errors of ours as two sentences on stderr, a closed pipe without a word."""
    try:
        app()
    except KvgeomError as error:
        err.print(f"kvgeom: error: {error.message}", markup=False, soft_wrap=True)
        if error.way_out:
            err.print(f"kvgeom: {error.way_out}", markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
