"""Edit rules on generated sources: nothing else changes, twice is once, the count is exact."""

from __future__ import annotations

import re

import pytest
from conftest import run_edits
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgeom.source import Problem, Source

SIMPLE = [
    "x = 1", "x: int = f(1)", "g(x, k=2)", "a; b", "a = 1; b = 2;", "del x", "assert x, 'no'",
    "'''text\nmore text\n'''", "x = [\n1,\n2,  # two\n]", "if x: y", "if x: y\nelse: z",
    "while x: pass", "global G", "@dec(1)\ndef h(): return 1", "x = f'{y!r:>{w}}'", "lambda: x",
    "with a as b, c: pass", "x = 'ä' \\\n+ 'ö'", "class C: z = 1", "try: a\nexcept E: b",
    "for i in x:\n<>a\n<>if b:\n<><>c\n<>elif d: e", "if a:\n<>b\n<># below b\n\nelse:\n<>c",
    "async def k():\n<>await x\n\n<>return y", "pass", "x = {'a': 1, **b}",
]  # fmt: skip
NOISE = ["", "# note", "    # odd indent", "# über\n\n# more"]


@st.composite
def bodies(draw, anchors: list[str]):
    """Lines of a block: the anchors in order among other statements, comments and blank lines."""
    out = []
    for anchor in [*anchors, None]:
        for _ in range(draw(st.integers(0, 3))):
            if draw(st.booleans()):
                out.append(draw(st.sampled_from(NOISE)))
            out.append(draw(st.sampled_from(SIMPLE)))
        if anchor is not None:
            out.append(anchor + draw(st.sampled_from(["", "  # beside", "   "])))
    return "\n".join(out) + "\n"


@st.composite
def sources(draw, anchors: list[str]):
    """(source bytes, scope): the anchors in one function of a class among others."""
    unit = draw(st.sampled_from(["    ", "  ", "\t"]))
    eol = draw(st.sampled_from(["\n", "\r\n"]))

    def block(text: str, depth: int) -> str:
        # A line inside a string or brackets may stand anywhere; indenting it all is simplest.
        lines = text.replace("<>", unit).split("\n")
        return "\n".join(unit * depth + line if line.strip() else line for line in lines)

    head = draw(st.sampled_from(["", "# licence\n", '"""Doc ü."""\n', "import os\n\n"]))
    doc = draw(st.sampled_from(["", '"""Doc."""\n']))
    sign = draw(
        st.sampled_from(["def f(self):", "def f(\n    self,\n):  # sign", "async def f():"])
    )
    text = head + "class K:\n" + block(draw(bodies([])) + "zero = 0\n", 1)
    text += block(f"def other():\n<>{anchors[0] if anchors else 'pass'}\n", 1)
    text += block(f"@dec\n{sign}\n", 1) + block(doc + draw(bodies(anchors)) + "last = 0\n", 2)
    text += draw(st.sampled_from(["\n\n", "", "    # after f\n"]))
    text += block(draw(bodies([])), 0) + "end = 0"
    text += draw(st.sampled_from(["\n", "", "\n\n", "\n# end\n"]))
    return text.replace("\n", eol).encode()


CODES = [
    "new(1)",
    "if new:\n    new(2)\n\n# ours\nnew(3)",
    "def n():\n    return 1",
    "n = '''a\nb'''",
]
RULES = settings(max_examples=120)


def once(raw: bytes, table: dict) -> bytes:
    """Apply; check that the result compiles, round-trips and stands."""
    states, out = run_edits(raw, table)
    assert states == ["to apply"]
    compile(out, "x.py", "exec")
    assert Source.parse(out).module.bytes == out
    assert run_edits(out, table) == (["applied"], out)
    return out


def without_added_lines(before: bytes, after: bytes) -> bool:
    """Whether `before` is `after` with one run of whole lines taken out."""
    old, new = before.split(b"\n"), after.split(b"\n")
    extra = len(new) - len(old)
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
    return any(new[:i] + new[i + extra :] == old for i in range(same + 1))


@RULES
@given(sources([]))
def test_a_source_prints_back(raw):
    assert Source.parse(raw).module.bytes == raw


@RULES
@given(sources(["anchor = at(1)"]), st.sampled_from(CODES), st.sampled_from(["after", "before"]))
def test_insert_adds_lines_and_nothing_else(raw, code, side):
    table = {"op": f"insert_{side}", "scope": "K.f", "at": "anchor = at(...)", "code": code}
    assert without_added_lines(raw, once(raw, table))


@RULES
@given(sources(["anchor = at(1)"]), st.sampled_from(["new(2)", "a or b", "1, 2", "x if y else z"]))
def test_replace_changes_one_expression(raw, code):
    table = {"op": "replace", "scope": "K.f", "at": "at(...)", "code": code}
    out = once(raw, table)
    head, _, tail = raw.rpartition(b"at(1)")
    assert out == head + code.encode() + tail


@RULES
@given(sources(["at(1, k=2)"]), st.sampled_from(["new(2)", "a or b"]))
def test_kwarg_changes_one_value(raw, code):
    table = {"op": "kwarg", "scope": "K.f", "at": "at(..., k=...)", "name": "k", "code": code}
    head, _, tail = raw.rpartition(b"at(1, k=2)")
    assert once(raw, table) == head + f"at(1, k={code})".encode() + tail


@RULES
@given(sources(["anchor = at(1)"]), st.sampled_from(CODES))
def test_body_leaves_what_is_around_the_body(raw, code):
    table = {"op": "body", "scope": "K.f", "code": code}
    out = once(raw, table)
    assert out.startswith(raw[: re.search(rb"@dec\r?\n", raw).end()])
    tail = raw[raw.rindex(b"end = 0") :]
    assert out.endswith(tail) and b"last = 0" not in out


@RULES
@given(sources([]), st.sampled_from([{"after": "other"}, {"before": "f"}, {"after": "f"}, {}]))
def test_define_adds_lines_and_nothing_else(raw, where):
    table = {"op": "define", "scope": "K", "code": "@dec\ndef new(self):\n    return 1", **where}
    out = once(raw, table)
    assert without_added_lines(raw, out) and out.count(b"def new") == 1


@RULES
@given(st.integers(0, 3), st.integers(1, 3), st.data())
def test_the_count_is_exact(present, count, data):
    raw = data.draw(sources(["anchor = at(1)"] * present))
    table = {
        "op": "insert_after", "scope": "K.f", "at": "anchor = at(...)", "code": "new()",
        "count": count,
    }  # fmt: skip
    if present == count:
        assert once(raw, table).count(b"new()") == count
        return
    with pytest.raises(Problem) as caught:
        run_edits(raw, table)
    assert f"found {present} times" in caught.value.why
    assert len(caught.value.lines) == present


@RULES
@given(st.permutations(range(4)), sources(["one()", "two()"]))
def test_edits_of_one_function_stand_together(order, raw):
    tables = [
        {"op": "insert_after", "scope": "K.f", "at": "one()", "code": "a1()"},
        {"op": "insert_after", "scope": "K.f", "at": "one()", "code": "a2()"},
        {"op": "insert_before", "scope": "K.f", "at": "two()", "code": "b1()"},
        {"op": "replace", "scope": "K.f", "at": "last = 0", "code": "last = 1"},
    ]
    tables = [tables[i] for i in order]
    states, out = run_edits(raw, *tables)
    assert states == ["to apply"] * 4
    assert run_edits(out, *tables) == (["applied"] * 4, out)
