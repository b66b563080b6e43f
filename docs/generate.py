"""Fills the generated blocks of README.md and docs/*.md with what their commands print.

    <!-- kvgeom COMMAND -->
    ...
    <!-- end -->

`make docs` fills all of them, `python docs/generate.py FILE...` those of some files.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
MARKDOWN = ("kvgeom releases --table", "kvgeom plan --published")
_BLOCK = re.compile(r"(<!-- (kvgeom [^>]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def blocks(page: str) -> dict[str, str]:
    """command -> the block that stands in the page's text."""
    return {found[2]: found[3] for found in _BLOCK.finditer(page)}


def block(command: str, printed: str) -> str:
    """What stands between the marks of a command: its Markdown, or a transcript."""
    if command in MARKDOWN:
        return printed
    return f"```console\n$ {command}\n{shorten(printed)}\n```\n"


def shorten(printed: str) -> str:
    """Without the folder that the virtual environment lies in, and blanks at a line's end."""
    lines = printed.replace(f"{Path(sys.prefix).parent}/", "").splitlines()
    return "\n".join(line.rstrip() for line in lines)


def run(command: str) -> str:
    """What a command prints. It ends with 0 or 1: a verdict of ours may be a bad one."""
    done = subprocess.run(
        [sys.executable, "-m", "kvgeom.cli", *shlex.split(command)[1:]],
        env={**os.environ, "COLUMNS": "100"},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode > 1:
        sys.exit(f"{command} ended with {done.returncode}")
    return done.stdout


def _filled(found: re.Match) -> str:
    return found[1] + block(found[2], run(found[2])) + found[4]


def main() -> None:
    for page in [Path(name) for name in sys.argv[1:]] or PAGES:
        text = page.read_text("utf-8")
        page.write_text(_BLOCK.sub(_filled, text), "utf-8")
        print(f"{page.name}: {len(blocks(text))} blocks")


if __name__ == "__main__":
    main()
