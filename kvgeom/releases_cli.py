"""`kvgeom releases`: fetch SGLang's releases into a cache; show what the series is on each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from kvgeom.boot_show import OnEvent
    from kvgeom.releases import Fetched, Say
    from kvgeom.series import Series


def releases(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RELEASE", help="Default: all that the series supports."),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print what the series is on each release.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for a script to read.")
    ] = False,
) -> None:
    """Fetch released SGLang wheels into a cache, unpacked, to try the series on.

    Example: `kvgeom releases 0.5.17`

    Downloads with pip, from where your pip downloads, into $XDG_CACHE_HOME/kvgeom/releases (about
    150 MB a release). What is there is compared with its checksums, and repaired; what is finished
    is not fetched again. 0.5.17 to 0.5.19 come with the older packages that they import.

    --table prints Markdown, from the code of all supported releases: **applied**, the PR's edits
    go in; **red**, and its tests fail there without them; **upstream**, the release's own code
    does what the PR does; **absent**, not for that release.

    Exit status: 0 everything is in place; 1 something could not be fetched, or the series does not
    fit a release; 2 wrong arguments; 130 interrupted.
    """
    from kvgeom import series
    from kvgeom.errors import KvgeomError

    if table and names:
        raise KvgeomError("--table shows all supported releases", "name none", exit_code=2)
    stack = series.load()
    found = fetch([*dict.fromkeys(names or map(str, stack.lock.releases))])
    if table:
        _print_table(stack, as_json)
    elif as_json:
        print(json.dumps(_json(found), indent=2))
    else:
        _print(found)


def fetched(release: str) -> Path:
    """The folder with a release's `sglang/`, fetched where it is missing."""
    from kvgeom import releases as cache

    fetch([release])
    return cache.tree(release)


def fetch(names: list[str]) -> list[Fetched]:
    """`releases.fetch` with a line of progress for each package."""
    from kvgeom import releases as cache
    from kvgeom.boot_show import Steps

    packages, out = cache.needed(names), []
    with Steps(_err(), [str(package) for package in packages]) as steps:
        for package in packages:
            with steps.step(str(package)) as on_event:
                out.append(cache.fetch_package(package, _say(on_event)))
    return out


def _say(on_event: OnEvent) -> Say:
    """What `releases.fetch` says as the events of a step."""
    return lambda text: on_event(*text.split(": ", 1))


def _err() -> Console:
    return Console(stderr=True, highlight=False)


def _print_table(stack: Series, as_json: bool) -> None:
    from kvgeom import releases_table
    from kvgeom.boot_show import Steps

    with Steps(_err(), ["table"]) as steps, steps.step("table") as on_event:
        cells = releases_table.matrix(stack, lambda release: on_event(str(release), "planning"))
    if as_json:
        print(json.dumps(releases_table.as_json(stack, cells), indent=2))
    else:
        print(releases_table.markdown(stack, cells), end="")


def _print(found: list[Fetched]) -> None:
    from kvgeom.cli_show import columns

    for line in columns([(str(f.package), str(f.result), str(f.package.folder)) for f in found]):
        print(line)


def _json(found: list[Fetched]) -> dict:
    from kvgeom import releases as cache

    return {
        "cache": str(cache.cache()),
        "packages": [
            {
                "package": f.package.name,
                "version": str(f.package.version),
                "result": str(f.result),
                "folder": str(f.package.folder),
                "wheel": f.wheel,
                "sha256": f.sha256,
            }
            for f in found
        ],
        "pythonpath": {
            str(f.package.version): [str(p) for p in cache.import_path(f.package.version)]
            for f in found
            if f.package.name == "sglang"
        },
    }
