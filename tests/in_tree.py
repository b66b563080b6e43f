"""Runs the tests that the series adds to SGLang as SGLang runs them, on one tree."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from kvgeom import series

STACK = series.load()


def node_ids(*pr_ids: str) -> dict[str, str]:
    """pytest's name of each test function that these PRs add."""
    found = {}
    for path in (f for pr in map(STACK.pr, pr_ids) for f in pr.files if f.startswith("test/")):
        for case in ast.parse((STACK.root / path).read_bytes()).body:
            for test in case.body if isinstance(case, ast.ClassDef) else ():
                if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                    found[test.name] = f"{STACK.root / path}::{case.name}::{test.name}"
    return found


def outcomes(
    root: Path, nodes: Iterable[str], *, before: Iterable[Path] = ()
) -> dict[str, str | None]:
    """The test functions of `nodes` on the SGLang in `root`: None where they pass, else what they
    say. `before`: folders whose packages come before the environment's."""
    report = root.parent / f"{root.name}.xml"
    path = os.pathsep.join(map(str, (root, *before)))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    env["TRITON_INTERPRET"] = "1"  # the table tests set it themselves, but not before their peers
    command = ["-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "--rootdir=/"]
    done = subprocess.run(
        [sys.executable, *command, "-c", os.devnull, f"--junit-xml={report}", *nodes],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
    )
    assert report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, str | None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [e for e in case if e.tag in ("failure", "error", "skipped")]
        said = "\n".join((e.get("message") or "") + (e.text or "") for e in bad)
        found[case.get("name")] = said or found.get(case.get("name"))
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return found
