"""Anchor shapes: Python syntax compared by structure, on LibCST trees.

A shape is one statement or expression in Python syntax. `...` in it matches anything: any one
expression, any run of arguments, elements or statements. `f(..., k=...)` is a call of `f` that has
the keyword `k`. Whitespace, comments, quotes, redundant parentheses and the order of keyword
arguments do not count; everything else does (an `if` with an `else` needs the `else` in the shape).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

import libcst as cst

# A node as nested tuples: (type, field, value, field, value, ...); a list: ("[", item, ...).
Canon = tuple

_FORMATTING = frozenset(
    ("lpar", "rpar", "lbracket", "rbracket", "lbrace", "rbrace", "comma", "semicolon", "equal")
    + ("dot", "colon", "first_colon", "second_colon", "start", "end", "separator", "newline")
    + ("leading_lines", "lines_after_decorators", "header", "footer", "trailing_whitespace")
    + ("indent", "default_indicator", "posonly_ind")
)
# Fields that hold a bare name, never an expression that a shape could mean.
_NAMES = {
    ("Attribute", "attr"),
    ("Arg", "keyword"),
    ("Param", "name"),
    ("FunctionDef", "name"),
    ("ClassDef", "name"),
    ("Import", "names"),
    ("ImportFrom", "names"),
    ("ImportFrom", "module"),
    ("NameItem", "name"),
}
# Fields whose expression is stored to or deleted; only what it reads inside can be an anchor.
_STORES = {"AssignTarget", "AnnAssign", "AugAssign", "For", "CompFor", "NamedExpr", "Del", "AsName"}

_ANY = ("Ellipsis",)
_RUNS = (
    ("Expr", "value", _ANY),
    ("Arg", "value", _ANY),
    ("Element", "value", _ANY),
    ("SubscriptElement", "slice", ("Index", "value", _ANY)),
)


@cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    names = [f.name for f in fields(kind)]
    if kind is cst.FormattedStringExpression:  # f"{x=}" prints the name: code, not formatting
        return ("expression", "equal", "conversion", "format_spec")
    return tuple(n for n in names if n not in _FORMATTING and not n.startswith("whitespace"))


class Canons:
    """The structural form of nodes, each computed once (it keeps the nodes alive)."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[cst.CSTNode, Canon]] = {}

    def __call__(self, node: cst.CSTNode) -> Canon:
        hit = self._known.get(id(node))
        if hit is None:
            hit = self._known[id(node)] = (node, self._make(node))
        return hit[1]

    def _make(self, node: cst.CSTNode) -> Canon:
        if isinstance(node, (cst.Module, cst.IndentedBlock, cst.SimpleStatementSuite)):
            return ("[", *(self(s) for s in statements(node)))
        if isinstance(node, cst.SimpleString):
            return ("String", repr(ast.literal_eval(node.value)))
        if isinstance(node, cst.ConcatenatedString) and node.evaluated_value is not None:
            return ("String", repr(node.evaluated_value))
        if isinstance(node, (cst.Integer, cst.Float, cst.Imaginary)):
            return ("Number", repr(ast.literal_eval(node.value)))
        out: list = [type(node).__name__]
        if isinstance(node, cst.FormattedString):  # its text is not evaluated: rf"" is not f""
            out += "prefix", node.prefix.lower()
        for name in _fields(type(node)):
            value = getattr(node, name)
            if _is_node(type(value)):
                out += name, self(value)
            elif isinstance(value, (list, tuple)):
                out += name, ("[", *(self(v) for v in value))
            elif value is not None and value != "" and not isinstance(value, cst.MaybeSentinel):
                out += name, value
        return tuple(out)


def statements(block: cst.CSTNode) -> list[cst.CSTNode]:
    """The statements of a module or a suite, `a; b` taken apart."""
    out: list[cst.CSTNode] = []
    for item in block.body:
        out += item.body if isinstance(item, cst.SimpleStatementLine) else [item]
    return out


def digest(canons: list[Canon]) -> str:
    """16 hex digits that change when code changes and not when comments or layout do."""
    return hashlib.sha256(repr(canons).encode()).hexdigest()[:16]


def like(shape: object, node: object) -> bool:
    """Whether the structural form `node` has the structural form `shape`."""
    if shape == _ANY or shape == _RUNS[0]:
        return True
    if not isinstance(shape, tuple) or not isinstance(node, tuple):
        return shape == node
    if shape[0] != node[0]:
        return False
    if shape[0] == "[":
        return _like_run(shape[1:], node[1:])
    if shape[0] == "Call":
        return like(_get(shape, "func"), _get(node, "func")) and _like_arguments(
            _get(shape, "args")[1:], _get(node, "args")[1:]
        )
    return len(shape) == len(node) and all(map(like, shape, node))


def _get(canon: Canon, field: str) -> object:
    return canon[canon.index(field) + 1] if field in canon[1::2] else None


def _like_run(shapes: Canon, nodes: Canon) -> bool:
    if not shapes:
        return not nodes
    if shapes[0] in _RUNS:
        return any(_like_run(shapes[1:], nodes[i:]) for i in range(len(nodes) + 1))
    return bool(nodes) and like(shapes[0], nodes[0]) and _like_run(shapes[1:], nodes[1:])


def _like_arguments(shapes: Canon, nodes: Canon) -> bool:
    wanted = {str(_get(s, "keyword")): s for s in shapes if _get(s, "keyword")}
    given = {str(_get(n, "keyword")): n for n in nodes if _get(n, "keyword")}
    if not all(k in given and like(s, given[k]) for k, s in wanted.items()):
        return False
    is_open = any(s in _RUNS for s in shapes)
    return (is_open or len(wanted) == len(given)) and _like_run(
        tuple(s for s in shapes if not _get(s, "keyword")),
        tuple(n for n in nodes if not _get(n, "keyword")),
    )


@dataclass(frozen=True)
class Shape:
    """A parsed shape. An expression shape also stands for the statement made of it alone."""

    text: str
    canon: Canon

    @property
    def is_expression(self) -> bool:
        return self.canon[0] == "Expr"

    def matches(self, node: cst.CSTNode, canons: Canons, as_statement: bool = True) -> bool:
        canon = self.canon[2] if self.is_expression and not as_statement else self.canon
        kind = type(node).__name__
        if canon[0] not in (kind, "String", "Number"):
            return False
        return like(canon, canons(node))


@cache
def parse_shape(text: str) -> Shape:
    """Raises ValueError with a sentence when `text` is not one statement or expression."""
    try:
        found = statements(cst.parse_module(text.strip() + "\n"))
    except cst.ParserSyntaxError as err:
        raise ValueError(f"shape is not Python: {text!r}: {err.message}") from None
    if len(found) != 1:
        raise ValueError(f"a shape is one statement or expression: {text!r}")
    canon = Canons()(found[0])
    if canon == _RUNS[0]:
        raise ValueError("a shape of `...` alone matches everything")
    return Shape(text.strip(), canon)


# A node with its ancestors, innermost first: (node, (parent, (grandparent, ... ()))).
Chain = tuple


def walk(root: cst.CSTNode, chain: Chain = ()) -> Iterator[tuple[cst.CSTNode, Chain]]:
    """Every statement and readable expression under `root`, with its ancestors, in file order."""
    todo = [(root, chain, False)]
    while todo:
        node, chain, stored = todo.pop()
        if not stored:
            yield node, chain
        kind, below = type(node).__name__, (node, chain)
        spread = stored and isinstance(node, (cst.Tuple, cst.List, cst.Element, cst.StarredElement))
        children = []
        for name in _fields(type(node)):
            if (kind, name) in _NAMES:
                continue
            target = spread or (kind in _STORES and name in ("target", "name"))
            value = getattr(node, name)
            for child in value if isinstance(value, (list, tuple)) else (value,):
                if _is_node(type(child)):
                    children.append((child, below, target))
        todo += reversed(children)


@cache
def _is_node(kind: type) -> bool:
    return issubclass(kind, cst.CSTNode)  # asked of an abstract class a million times, it is slow


def ancestors(chain: Chain) -> Iterator[cst.CSTNode]:
    while chain:
        yield chain[0]
        chain = chain[1]
