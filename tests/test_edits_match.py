"""Shapes: what `...` stands for, and what does not count."""

from __future__ import annotations

import libcst as cst
import pytest

from kvgeom.match import Canons, digest, parse_shape, statements


def matches(shape: str, code: str) -> bool:
    node = statements(cst.parse_module(code + "\n"))[0]
    return parse_shape(shape).matches(node, Canons())


@pytest.mark.parametrize(
    "shape, code",
    [
        ("x = ...", "x = a + b"),
        ("f(...)", "f()"),
        ("f(...)", "f(a, *b, c=1, **d)"),
        ("f(a, ...)", "f(a, 1, 2)"),
        ("f(..., z)", "f(1, 2, z)"),
        ("f(..., k=...)", "f(1, j=2, k=3)"),
        ("f(b=1, a=2)", "f(a=2, b=1)"),
        ("f(...).g(...)", "f(1).g(2)"),
        ("[..., 1]", "[1]"),
        ("[...]", "[]"),
        ("{...: 1}", "{a + b: 1}"),
        ("a[...]", "a[1:2, 3]"),
        ("return ...", "return"[:0] + "return x"),
        ("assert ..., ...", "assert a, b"),
        ("if a: ...", "if a:\n    b\n    c"),
        ("if a: ...", "if a: b"),
        ("if a:\n    ...\n    c", "if a:\n    b\n    c"),
        ("for x in ...: ...", "for x in y:\n    z"),
        ("with f(...) as g: ...", "with f(1) as g:\n    pass"),
        ("def f(a): ...", "def f(a):\n    return 1"),
        ("try: ...\nexcept E: ...", "try:\n    a\n    b\nexcept E:\n    pass"),
        ("x = 'a'", 'x = "a"'),
        ("x = 'ab'", 'x = ("a"\n    "b")'),
        ("x = 1000", "x = 1_000"),
        ("x = (a, b)", "x = a,   b  # c"),
        ("x = a.b", "x = (a).b"),
        ("a is not None", "a is  not  None"),
    ],
)
def test_matches(shape, code):
    assert matches(shape, code)


@pytest.mark.parametrize(
    "shape, code",
    [
        ("x = ...", "y = 1"),
        ("x = ...", "x += 1"),
        ("x = ...", "x: int = 1"),
        ("f(...)", "g(1)"),
        ("f(...)", "f(1).x"),
        ("f(a)", "f(a, b)"),
        ("f(a)", "f(a, k=1)"),
        ("f(..., k=...)", "f(k)"),
        ("f(..., k=1)", "f(k=2)"),
        ("f(k=1)", "f(k=1, j=2)"),
        ("f(..., z)", "f(z, 1)"),
        ("[1, ...]", "[2, 1]"),
        ("if a: ...", "if a: b\nelse: c"),
        ("if a: ...", "while a: b"),
        ("for x in ...: ...", "async def g():\n    pass"),
        ("x = f'{a}'", "x = f'{a!r}'"),
        ("x = f'{a}'", "x = f'{a=}'"),
        ("x = rf'\\n{a}'", "x = f'\\n{a}'"),
        ("x = b'a'", "x = 'a'"),
        ("x = 1", "x = 1.0"),
        ("from .a import b", "from ..a import b"),
        ("def f(a): ...", "def f(a, b): ..."),
        ("def f(a): ...", "async def f(a): ..."),
        ("a < b", "a <= b"),
        ("a not in b", "a in b"),
    ],
)
def test_does_not_match(shape, code):
    assert not matches(shape, code)


@pytest.mark.parametrize("text", ["", "a; b", "...", "x = ", "def f("])
def test_what_is_no_shape(text):
    with pytest.raises(ValueError):
        parse_shape(text)


def form(code: str) -> str:
    return digest([Canons()(cst.parse_module(code))])


def test_the_digest_does_not_see_layout_and_sees_code():
    code = "def f(a, b):\n    # why\n    x = g(a,  b)\n\n    return (x)\n"
    assert form(code) == form("def f(\n  a,\n  b,\n): # c\n  x = g(a, b); return x\n")
    for other in (
        code.replace("g(", "h("),
        code.replace("a, b", "b, a"),
        code.replace("return (x)", "return x + 0"),
        code.replace("    x =", "    if a: x ="),
    ):
        assert form(code) != form(other)
