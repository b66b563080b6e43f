"""Where an edit finds its place, how often, and what it says when it does not."""

from __future__ import annotations

import pytest
from conftest import applied, parse_edits, run_edits
from test_edits_ops import SOURCE, refused

from kvgeom import rewrite
from kvgeom.source import Problem, Source


def test_several_scopes_and_alternatives():
    source = "def f():\n    return a.x\ndef g():\n    return b(1)\n"
    out = applied(
        source,
        op="replace",
        scope=["f", "g"],
        at=["a.x", {"match": "b(...)", "code": "new(2)"}],
        code="new()",
    )
    assert out == "def f():\n    return new()\ndef g():\n    return new(2)\n"


def test_count():
    source = "def f():\n    return g(1) + g(2)\n"
    problem = refused(source, op="replace", scope="f", at="g(...)", code="h()")
    assert "found 2 times in 'f', wanted 1" in problem.why and problem.lines == (2, 2)
    assert applied(source, op="replace", scope="f", at="g(...)", code="h()", count=2) == (
        "def f():\n    return h() + h()\n"
    )


def test_half_of_a_count_is_refused():
    source = "def f():\n    return g(1) + h()\n"
    problem = refused(source, op="replace", scope="f", at="g(...)", code="h()", count=2)
    assert "its result stands 1 times" in problem.why


def test_nested_anchors_are_refused():
    source = "x = g(g(1))\n"
    assert "inside another" in refused(source, op="replace", at="g(...)", code="h()", count=2).why


def test_a_missing_anchor_shows_what_comes_close():
    problem = refused(
        SOURCE, op="insert_after", scope="K.q", at="a = self.make(...)", code="chk(a)"
    )
    assert "found 0 times" in problem.why
    assert problem.near[0] == "line 15: a = self.mk( 1, )"


def test_a_missing_scope_shows_names_that_come_close():
    problem = refused(SOURCE, op="body", scope="K.qq", code="pass")
    assert "scope 'K.qq' found 0 times" in problem.why and "line 14: K.q" in problem.near


def test_an_ambiguous_scope_names_its_lines():
    source = (
        "class K:\n    @property\n    def p(self): pass\n    @p.setter\n    def p(self, v): pass\n"
    )
    problem = refused(source, op="body", scope="K.p", code="pass")
    assert "found 2 times" in problem.why and len(problem.lines) == 2


def test_satisfied_means_nothing_to_do():
    source = "def f():\n    return page()\n"
    table = {
        "op": "replace", "scope": "f", "at": "args.page", "code": "page()", "satisfied": "page()",
    }  # fmt: skip
    assert run_edits(source, table) == (["already upstream"], source.encode())
    body = {"op": "body", "scope": "f", "code": "return 1", "satisfied": ["x", "page(...)"]}
    assert run_edits(source, body) == (["already upstream"], source.encode())
    define = {
        "op": "define", "after": "f", "code": "def g(): pass", "satisfied": "def f(): ...",
    }  # fmt: skip
    assert run_edits(source, define) == (["already upstream"], source.encode())


def test_line_numbers_are_those_of_the_file_as_found():
    tables = [
        {"op": "insert_before", "scope": "K.p", "at": "return f(...)", "code": "h()\nh()\nh()"},
        {"op": "replace", "scope": "K.q", "at": "g(...)", "code": "1"},
    ]
    with pytest.raises(Problem) as caught:
        run_edits(SOURCE, *tables)
    assert caught.value.lines == (19, 19)


@pytest.mark.parametrize("eol", ["\r\n", "\n"])
@pytest.mark.parametrize("indent", ["\t", "  ", "    "])
def test_line_ends_and_indentation_are_those_of_the_file(eol, indent):
    source = "class K:\n    def f(self):\n        a = 1  # ü\n        return a\n"
    source = source.replace("    ", indent).replace("\n", eol)
    code = "if a:\n    b = 2\nc = 3"
    out = applied(source.encode(), op="insert_after", scope="K.f", at="a = 1", code=code)
    ours = f"{indent * 2}if a:{eol}{indent * 3}b = 2{eol}{indent * 2}c = 3{eol}"
    assert out == source.replace(f"ü{eol}", f"ü{eol}{ours}")


def test_a_byte_order_mark_stays():
    out = applied(b"\xef\xbb\xbfx = f(1)\n", op="replace", at="f(1)", code="f(2)")
    assert out.encode() == b"\xef\xbb\xbfx = f(2)\n"


def test_text_that_is_there_twice_is_edited_in_the_right_place():
    source = 'T = """\nx = f(1)\n"""\nx = f(1)\n'
    assert applied(source, op="replace", at="f(1)", code="f(2)") == source[:-9] + "x = f(2)\n"


def test_a_file_that_is_not_python_is_a_problem():
    with pytest.raises(Problem, match="not Python"):
        Source.parse(b"def f(:\n")


def test_a_replacement_of_many_sites_parses_our_code_for_each():
    source = "x = [f(1), f(2), f(3)]\n"
    edit = parse_edits({"op": "replace", "at": "f(...)", "code": "g(a, b)", "count": 3})[0]
    outcome = rewrite.evaluate(Source.parse(source.encode()), edit)
    assert outcome.source.raw == b"x = [g(a, b), g(a, b), g(a, b)]\n"
    assert len(outcome.sites) == 3
