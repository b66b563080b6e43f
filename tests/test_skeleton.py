"""Leaving out what no edit needs changes nothing but the time that a plan takes."""

from __future__ import annotations

import ast

import pytest

from kvgeom import edits, plan, series, skeleton, tree
from kvgeom.rewrite import evaluate
from kvgeom.source import Source

SOURCE = '''"""Module."""
import os


@decorated(
    1
)
def before():
    return 1
    # its own comment

# the next one's comment
class K:
    """Doc."""

    x = 1

    @property
    def unneeded(self):
        text = """
        not at all
        """
        return text  # tail

    def kept(self):
        return 2

    async def last(self): return 3


def after():
    def inner():
        pass
    return inner
'''


def edit(**table):
    table = {"pr": "p", "id": "e", "op": "body", "in": "K.kept", "code": "pass", **table}
    lines = "\n".join(f"{key} = {value!r}" for key, value in table.items() if value is not None)
    found, errors = edits.load("x.py", "[[edit]]\n" + lines)
    assert not errors
    return found[0]


def definitions(text: str) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [n.name for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_rest_is_strings_on_the_same_lines(end):
    source = SOURCE.replace("\n", end)
    found = skeleton.of(source.encode(), [edit()]).decode()
    assert sorted(definitions(found)) == ["K", "kept"]
    before, after = source.split(end), found.split(end)
    assert len(after) == len(before)
    kept = [i for i, line in enumerate(before) if line == after[i]]
    for line in ("# the next one's comment", "class K:", "    def kept(self):", "    x = 1"):
        assert before.index(line) in kept
    assert "its own comment" not in found


@pytest.mark.parametrize(
    "table, names",
    [
        ({"op": "import", "in": None, "code": "import re"}, []),
        (
            {"op": "define", "in": "K", "after": "kept", "code": "def new(self): pass"},
            ["K", "kept"],
        ),
        ({"op": "define", "in": None, "before": "after", "code": "def new(): pass"}, None),
        ({"op": "insert_after", "in": "K", "at": "x = 1"}, None),
    ],
)
def test_what_an_edit_needs(table, names):
    found = sorted(definitions(skeleton.of(SOURCE.encode(), [edit(**table)]).decode()))
    if table["op"] == "insert_after":  # anywhere in the class
        names = ["K", "kept", "last", "unneeded"]
    elif names is None:
        names = ["after", "inner"]
    assert found == names


@pytest.mark.parametrize(
    "table, names",
    [
        ({"in": None, "at": "inner()", "code": "f(x)"}, ["after", "inner"]),
        ({"in": None, "at": "f(...)", "code": "return inner"}, ["after", "inner"]),  # it may stand
        ({"in": None, "at": "f(...)", "code": "f(g)", "satisfied": "text"}, ["K", "unneeded"]),
        ({"in": None, "at": "async def last(self): ...", "code": "f(x)"}, ["K", "last"]),
        ({"in": "K", "at": "return text", "code": "f(x)"}, ["K", "unneeded"]),
        ({"in": "K", "at": "x = 1", "code": "x = 2"}, ["K"]),
        ({"in": "K.kept", "at": "return 2", "code": "return 3"}, ["K", "kept"]),
        ({"in": None, "at": "from a.b import c", "code": "import d"}, []),
    ],
)
def test_what_an_anchor_names(table, names):
    found = set(definitions(skeleton.of(SOURCE.encode(), [edit(op="replace", **table)]).decode()))
    whole = {"K", "kept", "last", "unneeded"} if table["in"] is None and "K" in names else set()
    assert found == {*names, *whole}


def test_both_definitions_of_a_name_are_kept():
    twice = b"import os\n\ndef f():\n    return 1\n\ndef f():\n    return x\n\ndef g():\n    pass\n"
    found = skeleton.of(twice, [edit(op="replace", at="return x", code="return y", **{"in": None})])
    assert definitions(found.decode()) == ["f", "f"]


@pytest.mark.parametrize("late, names", [("import re\n", ["f"]), ("", [])])
def test_the_definition_that_ends_the_imports_is_kept(late, names):
    raw = f"import os\n\ndef f():\n    pass\n\n{late}\ndef g():\n    pass\n".encode()
    new = edit(op="import", code="import ast", **{"in": None})
    assert definitions(skeleton.of(raw, [new]).decode()) == names
    results = [evaluate(Source.parse(raw, edits), new).source.raw for edits in (None, [new])]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "table",
    [
        {"op": "replace", "in": None, "at": "[...]"},  # anywhere in the module, and nameless
        {"op": "define", "in": None, "code": "def new(): pass"},  # after the last definition
    ],
)
def test_everything_is_kept_where_everything_is_looked_at(table):
    assert skeleton.of(SOURCE.encode(), [edit(**table)]) == SOURCE.encode()


def test_a_file_that_python_cannot_read_is_left_alone():
    for raw in (b"def f(:\n", b"x = '\xff'\n", b"x = 1\ry = 2\r", b"\x0cdef f(): pass\n"):
        assert skeleton.of(raw, [edit()]) == raw


def test_names_that_come_close_are_left_out_where_python_cannot_read_the_file():
    """LibCST may read what an older Python cannot."""
    text = b"class K:\n    def kept(self): ...\n"
    assert skeleton.lines_of_definitions(text) == [("K", 1), ("K.kept", 2)]
    assert skeleton.lines_of_definitions(text + b"type = = 1\n") == []


def test_the_plan_of_the_release_is_the_same(monkeypatch):
    stack, installed = series.load(), tree.find(None)
    passes, make = [], plan._make
    monkeypatch.setattr(plan, "_make", lambda *args: passes.append(1) or make(*args))

    def made():
        result = plan.make(stack, installed.read, installed.release, writes=installed.writes)
        assert result.problems == ()
        return result.changes, result.digests

    short = made()
    assert len(passes) == 1, "the edits do not fit what was kept, so everything was read again"
    monkeypatch.setattr(skeleton, "of", lambda raw, edits: raw)
    assert made() == short
