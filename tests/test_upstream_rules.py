"""SGLang's own rules, on everything of ours that goes into its tree: the new files, the tests, and
the code inside the edits. Its CI registration is checked with its own parser."""

from __future__ import annotations

import importlib.util
import io
import re
import textwrap
import tokenize
from pathlib import Path

import pytest

from kvgeom import series, tree

STACK = series.load()
NEW = {f: STACK.root / f for pr in STACK.prs for f in pr.files}
TESTS = {f: p for f, p in NEW.items() if f.startswith("test/")}
EDITS = {f"{e.file} {e.id}": e for pr in STACK.prs for e in pr.edits if e.code}
# black's width, which SGLang formats with; an edit's code is indented to its place.
WIDTH = 88


def sources():
    for name, path in NEW.items():
        yield name, path.read_text("utf-8")
    for name, edit in EDITS.items():
        yield name, textwrap.dedent(edit.code)


SOURCES = dict(sources())


def comments(text: str) -> list[list[str]]:
    """Runs of comment lines that follow each other."""
    runs: list[list[str]] = []
    last = -2
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            if token.start[0] != last + 1:
                runs.append([])
            runs[-1].append(token.string)
            last = token.start[0]
    return runs


@pytest.mark.parametrize("name", SOURCES)
def test_text(name):
    text = SOURCES[name]
    assert text.isascii()
    assert not re.search(r"#\d{3,}|\bPR \d|pull/\d|Args:\n|Returns:\n", text)
    assert "kvgeom" not in text
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize("name", SOURCES)
def test_comments_are_one_or_two_lines(name):
    assert [run for run in comments(SOURCES[name]) if len(run) > 2] == []


@pytest.mark.parametrize("name", SOURCES)
def test_no_dataclasses_no_bare_asserts_on_geometry(name):
    text = SOURCES[name]
    assert "@dataclass" not in text
    assert not re.search(r"\bgetattr\(", text), "SGLang's reviewers refuse defensive getattr"


@pytest.fixture(scope="module")
def ci_register():
    """`sglang.test.ci.ci_register` of the installed package, without importing sglang."""
    path = tree.find(None).package / "test/ci/ci_register.py"
    spec = importlib.util.spec_from_file_location("ci_register", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TESTS)
def test_registered_for_sglangs_ci(name, ci_register):
    (registry,) = ci_register.collect_tests([str(TESTS[name])])
    assert registry.disabled is None
    assert registry.backend is ci_register.HWBackend.CPU
    assert registry.suite == "base-a-test-cpu"
    assert 0 < registry.est_time < 1200


@pytest.mark.parametrize("name", TESTS)
def test_lies_where_sglang_keeps_tests(name):
    assert re.fullmatch(r"test/registered/[\w/]+/test_\w+\.py", name)
    assert Path(name).stem not in {Path(o).stem for o in TESTS if o != name}
