"""The ops on little sources: what is written, what stays byte for byte, what is refused."""

from __future__ import annotations

import difflib

import pytest
from conftest import applied, run_edits

from kvgeom.source import Problem

SOURCE = '''\
import os


class K:
    @property
    def p(
        self, x: dict = {1: 2},
    ) -> int:  # é
        """Doc."""
        # stale
        return f(1)  # tail

    # about q
    def q(self):
        a = self.mk(
            1,
        )
        if a:  # why
            return g(a), g(0)
        elif b: return 2
        x = 1; y = 2
        return a  # the end


# after the class
Z = 3
'''


def refused(source: str, **table) -> Problem:
    with pytest.raises(Problem) as caught:
        run_edits(source, table)
    return caught.value


def only_change(before: str, after: str) -> tuple[str, str]:
    """The lines taken away and the lines added."""
    lines = list(difflib.unified_diff(before.split("\n"), after.split("\n"), n=0))[2:]
    return tuple("".join(f"{x[1:]}\n" for x in lines if x[0] == sign) for sign in "-+")


def test_body_keeps_signature_decorator_and_docstring():
    out = applied(SOURCE, op="body", scope="K.p", code="return 3")
    assert out == SOURCE.replace("        # stale\n        return f(1)  # tail", "        return 3")


def test_body_with_its_own_docstring_replaces_the_old_one():
    out = applied(SOURCE, op="body", scope="K.p", code='"""New."""\nreturn 3')
    assert '"""New."""' in out and "Doc." not in out


def test_body_of_a_one_line_function():
    out = applied("def f(): return 1\nx = 2\n", op="body", scope="f", code="a = 1\nreturn a")
    assert out == "def f():\n    a = 1\n    return a\nx = 2\n"


def test_body_that_differs_only_in_layout_stands():
    source = "def f():\n    return   g( 1 )  # here\n"
    table = {"op": "body", "scope": "f", "code": "return g(1)"}
    assert run_edits(source, table) == (["applied"], source.encode())


def test_body_drops_comments_at_its_end_only():
    source = "def f():\n    return 1\n    # stale\n\n\n# next\ndef g(): pass\n"
    out = applied(source, op="body", scope="f", code="return 2")
    assert out == "def f():\n    return 2\n\n\n# next\ndef g(): pass\n"


def test_body_of_a_class_is_refused():
    assert "not a function" in refused(SOURCE, op="body", scope="K", code="pass").why


def test_insert_after_a_call_over_lines():
    out = applied(SOURCE, op="insert_after", scope="K.q", at="a = self.mk(...)", code="chk(a)")
    assert only_change(SOURCE, out) == ("", "        chk(a)\n")


def test_insert_before_goes_between_blank_lines_and_comments():
    source = "def f():\n    a = 1\n\n    # about b\n    b = 2\n"
    out = applied(source, op="insert_before", scope="f", at="b = 2", code="c = 3")
    assert out == "def f():\n    a = 1\n\n    c = 3\n    # about b\n    b = 2\n"


def test_insert_beside_a_compound_statement():
    at = "if a: ...\nelif ...: ..."
    out = applied(SOURCE, op="insert_after", scope="K.q", at=at, code="h()")
    assert only_change(SOURCE, out) == ("", "        h()\n")


def test_insert_keeps_comments_and_blocks_of_our_code():
    code = "# ours\nif a:\n    h(a)\n\n    # more\n    i(a)"
    out = applied(SOURCE, op="insert_after", scope="K.q", at="a = self.mk(...)", code=code)
    ours = "        # ours\n        if a:\n            h(a)\n\n            # more\n"
    assert only_change(SOURCE, out) == ("", ours + "            i(a)\n")


def test_insert_at_module_level():
    out = applied(SOURCE, op="insert_after", at="Z = ...", code="Y = 4")
    assert out == SOURCE + "Y = 4\n"


def test_insert_at_the_end_of_a_file_without_a_newline():
    out = applied("def f():\n    a = 1", op="insert_after", scope="f", at="a = 1", code="b = 2")
    assert out == "def f():\n    a = 1\n    b = 2"


@pytest.mark.parametrize("at", ["x = 1", "y = 2", "return 2"])
@pytest.mark.parametrize("op", ["insert_after", "insert_before"])
def test_insert_beside_a_statement_that_shares_its_line_is_refused(op, at):
    problem = refused(SOURCE, op=op, scope="K.q", at=at, code="h()")
    assert "shares its line" in problem.why and len(problem.lines) == 1


def test_insert_before_an_elif_is_refused():
    assert (
        "shares its line"
        in refused(SOURCE, op="insert_before", scope="K.q", at="if b: ...", code="h()").why
    )


def test_two_inserts_after_one_anchor_both_stand():
    tables = [
        {"op": "insert_after", "scope": "K.q", "at": "a = self.mk(...)", "code": c}
        for c in ("one(a)", "two(a)\nthree(a)")
    ]
    states, raw = run_edits(SOURCE, *tables)
    assert states == ["to apply"] * 2
    assert run_edits(raw, *tables) == (["applied"] * 2, raw)


def test_an_insert_that_stands_elsewhere_in_the_block_is_not_taken_for_ours():
    source = "def f():\n    a = 1\n    b()\n    c()\n"
    states, raw = run_edits(
        source, {"op": "insert_after", "scope": "f", "at": "a = 1", "code": "c()"}
    )
    assert states == ["to apply"] and raw == b"def f():\n    a = 1\n    c()\n    b()\n    c()\n"


def test_replace_an_expression_keeps_the_rest_of_the_line():
    out = applied(SOURCE, op="replace", scope="K.p", at="f(...)", code="self.f(2)")
    assert only_change(SOURCE, out) == (
        "        return f(1)  # tail\n",
        "        return self.f(2)  # tail\n",
    )


@pytest.mark.parametrize(
    "line, at, code, want",
    [
        ("x = (a + b) * c", "a + b", "a - b", "x = (a - b) * c"),
        ("x = a * c", "a", "b or d", "x = (b or d) * c"),
        ("x = a", "a", "b or d", "x = b or d"),
        ("x = f(a)", "a", "1, 2", "x = f((1, 2))"),
        ("x = not a", "a", "b if c else d", "x = not (b if c else d)"),
        ("x = a.b", "a", "lambda: 1", "x = (lambda: 1).b"),
        ("x = f'{a}'", "a", "b.c", "x = f'{b.c}'"),
    ],
)
def test_replace_puts_parentheses_where_they_are_needed(line, at, code, want):
    assert applied(f"{line}\n", op="replace", at=at, code=code) == f"{want}\n"


def test_replace_may_contain_its_own_anchor():
    source = "def f():\n    return g(1)\n"
    assert "return h(g(1))" in applied(source, op="replace", scope="f", at="g(...)", code="h(g(1))")


def test_replace_a_statement_keeps_the_comments_above_and_beside_it():
    source = "def f():\n    # above\n    a = g()  # beside\n    return a\n"
    out = applied(source, op="replace", scope="f", at="a = g(...)", code="a = h(1)")
    assert out == source.replace("g()", "h(1)")


def test_replace_a_statement_by_several():
    out = applied(SOURCE, op="replace", scope="K.q", at="return a", code="b = a\nreturn b")
    assert "        b = a\n        return b\n" in out


def test_replace_one_of_two_statements_on_a_line():
    out = applied(SOURCE, op="replace", scope="K.q", at="x = 1", code="x = 5")
    assert only_change(SOURCE, out) == (
        "        x = 1; y = 2\n",
        "        x = 5; y = 2\n",
    )


def test_replace_a_compound_statement():
    at = "if a: ...\nelif ...: ..."
    out = applied(SOURCE, op="replace", scope="K.q", at=at, code="while a:\n    a = h(a)")
    assert "        while a:\n            a = h(a)\n        x = 1; y = 2\n" in out


def test_replace_does_not_touch_targets_names_or_keywords():
    source = "def size(size):\n    size = size\n    f(size=1).size\n    global size\n"
    states, raw = run_edits(source, {"op": "replace", "scope": "size", "at": "size", "code": "n"})
    assert raw == source.replace("size = size", "size = n").encode()
    assert states == ["to apply"]


def test_replace_in_an_f_string_and_in_a_decorator():
    source = "class K:\n    @dec(n)\n    def f(self):\n        return f'{g(1)!r:>{w}}'\n"
    assert "{h(2)!r:>" in applied(source, op="replace", scope="K.f", at="g(...)", code="h(2)")
    assert "@dec(m)" in applied(source, op="replace", scope="K.f", at="dec(n)", code="dec(m)")


def test_kwarg_sets_the_value():
    source = "x = f(a, page=g(1),  size = 2)\n"
    out = applied(source, op="kwarg", at="f(..., page=...)", name="page", code="h(2)")
    assert out == "x = f(a, page=h(2),  size = 2)\n"


@pytest.mark.parametrize(
    "call, want",
    [
        ("f()", "f(page=1)"),
        ("f(a, b=2)", "f(a, b=2, page=1)"),
        ("f(a, **k)", "f(a, **k, page=1)"),
        ("f(a,)", "f(a, page=1,)"),
        ("f(\n    a,\n    b=2,\n)", "f(\n    a,\n    b=2,\n    page=1,\n)"),
        ("f(\n    a\n)", "f(\n    a,\n    page=1\n)"),
    ],
)
def test_kwarg_adds_what_is_not_there(call, want):
    out = applied(f"x = {call}\n", op="kwarg", at="f(...)", name="page", code="1")
    assert out == f"x = {want}\n"


def test_define_after_and_before_a_decorated_neighbour():
    code = "@dec\ndef n(self):\n    return 1"
    after = applied(SOURCE, op="define", scope="K", after="p", code=code)
    ours = "    @dec\n    def n(self):\n        return 1\n\n"
    assert after == SOURCE.replace("    # about q\n", ours + "    # about q\n")
    before = applied(SOURCE, op="define", scope="K", before="q", code=code)
    assert before == after
    first = applied(SOURCE, op="define", scope="K", before="p", code=code)
    assert first == SOURCE.replace("class K:\n", "class K:\n" + ours)


def test_define_in_the_module_has_two_blank_lines():
    source = "def f():\n    pass\n\n\nx = f()\n"
    out = applied(source, op="define", after="f", code="def g():\n    pass")
    assert out == "def f():\n    pass\n\n\ndef g():\n    pass\n\n\nx = f()\n"


def test_define_indents_a_docstring_and_leaves_other_strings():
    code = 'def n(self):\n    """A\n\n    b\n    """\n    return """x\n  y"""'
    out = applied(SOURCE, op="define", scope="K", after="p", code=code)
    assert '        """A\n\n        b\n        """\n        return """x\n  y"""\n' in out


def test_strings_that_follow_each_other_are_indented_and_a_long_one_is_not():
    code = (
        'def n(self):\n    return f(\n        "a"\n        f"{b}"\n        f"""c\n{d}\n e"""\n    )'
    )
    out = applied(SOURCE, op="define", scope="K", after="p", code=code)
    strings = '            "a"\n            f"{b}"\n            f"""c\n{d}\n e"""\n'
    assert f"        return f(\n{strings}        )\n" in out


def test_define_replaces_a_definition_of_that_name():
    out = applied(SOURCE, op="define", scope="K", after="p", code="def q(self):\n    return 1")
    assert "    # about q\n    def q(self):\n        return 1\n\n\n# after the class" in out


def test_define_finds_definitions_under_an_if():
    source = "if cuda:\n    def f():\n        return 1\n"
    out = applied(source, op="define", after="f", code="def g():\n    return 2")
    assert out == source + "\n    def g():\n        return 2\n"


def test_define_without_its_neighbour_names_the_definitions():
    problem = refused(SOURCE, op="define", scope="K", after="r", code="def n(self): pass")
    assert "neighbour 'r' found 0 times" in problem.why and "p, q" in problem.near[0]
