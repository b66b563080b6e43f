"""The op delete: what goes, what stays, what is refused."""

from __future__ import annotations

import pytest
from conftest import LittleSeries, applied, parse_edits, run_edits, toml_edit
from packaging.version import Version

from kvgeom import edits, plan
from kvgeom.source import Problem

SOURCE = """\
import os
from a import (
    b,
)


def old(x):
    return x


def f(x):
    y = g(x)

    # checked a second time
    # for pages
    if y > 1:
        assert x < y, "past the row"

    return y
"""


def test_a_statement_goes_with_its_comments():
    out = applied(SOURCE, op="delete", scope="f", at="if y > 1: ...")
    assert out == SOURCE.replace(
        "\n    # checked a second time\n    # for pages\n"
        '    if y > 1:\n        assert x < y, "past the row"\n',
        "",
    )


@pytest.mark.parametrize(
    "at, gone",
    [
        ("def old(x): ...", "\n\ndef old(x):\n    return x\n"),
        ("from a import (b)", "from a import (\n    b,\n)\n"),
    ],
)
def test_a_statement_of_the_module_goes(at, gone):
    assert gone in SOURCE
    assert applied(SOURCE, op="delete", at=at) == SOURCE.replace(gone, "")


def test_every_counted_anchor_goes():
    source = "def f():\n    a()\n    b()\n    a()\n"
    assert applied(source, op="delete", scope="f", at="a()", count=2) == "def f():\n    b()\n"
    with pytest.raises(Problem, match="found 2 times in 'f', wanted 1"):
        run_edits(source, {"op": "delete", "scope": "f", "at": "a()"})


def test_the_last_statement_of_a_block_stays():
    with pytest.raises(Problem, match="nothing would be left"):
        run_edits("def f():\n    a()\n", {"op": "delete", "scope": "f", "at": "a()"})


def test_it_takes_no_code():
    _, errors = edits.load("x.py", toml_edit(op="delete", at="a()", code="b()"))
    assert errors == ["x.py.edits.toml: edit 'e': 'code' means nothing for op 'delete'"]
    assert parse_edits({"op": "delete", "at": "a()"})[0].code == ""


def test_a_drifted_anchor_is_not_taken_for_done(tmp_path):
    """Its anchor is gone on a tree where the PR's other edits are still to do."""
    tables = [
        {"op": "delete", "id": "guard", "scope": "f", "at": "if z > 1: ..."},
        {"op": "replace", "id": "other", "scope": "f", "at": "g(x)", "code": "h(x)"},
    ]
    stack = (
        LittleSeries(tmp_path)
        .toml('upstream = "sglang"\n[[pr]]\nid = "one"\ntitle = "t"\nbody = "b"\nfiles = []\n')
        .edits("m.py", *tables)
        .load()
    )
    made = plan.make(stack, lambda path: SOURCE.encode(), Version("1.0"), check_lock=False)
    assert [str(p) for p in made.problems] == [
        "PR 'one' is partly in place already, and not by kvgeom (edits guard)"
    ]
