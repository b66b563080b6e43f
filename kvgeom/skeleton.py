"""A file with the definitions that no edit needs left out, so that LibCST has less to parse.

A definition left out becomes a string of as many lines. Line numbers stay what they are, and what
stands before and after it stays apart.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kvgeom.edits import ANCHORED, Edit

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMMENT = re.compile(r"[ \t]*#")
_WORD = re.compile(r"\w+")
_BLANK = re.compile(r"[ \t]*\r?$")


def of(raw: bytes, edits: Iterable[Edit]) -> bytes:
    """A file with only what `edits` look at; the file itself where that is all of it."""
    try:
        text = raw.decode("utf-8")
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return raw
    lines = text.split("\n")
    members = list(_members(_below_imports(body), "", lines))
    needed = {path for edit in edits for path in _needs(edit, members)}
    if "" in needed or "\r" in text.replace("\r\n", "") or "\f" in text:
        return raw  # all of it is needed, or ast counts its lines in another way
    for node in _unneeded(members, needed):
        _leave_out(lines, node)
    return "\n".join(lines).encode("utf-8")


def lines_of_definitions(raw: bytes) -> list[tuple[str, int]]:
    """Dotted names and lines of a file's definitions; LibCST takes a second for its lines."""
    try:
        todo: list[tuple[str, ast.AST]] = [("", ast.parse(raw))]
    except (SyntaxError, ValueError):  # LibCST knows newer syntax than an older Python
        return []
    out = []
    while todo:
        prefix, at = todo.pop()
        for node in ast.iter_child_nodes(at):
            inside = prefix
            if isinstance(node, _DEFINITIONS):
                out.append((prefix + node.name, node.lineno))
                inside = f"{prefix}{node.name}."
            if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                todo.append((inside, node))
    return out


def _below_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body from its first definition; without that one where it has imports below it.

    An added import goes above the first definition, which therefore has to stay.
    """
    first = next((i for i, n in enumerate(body) if isinstance(n, _DEFINITIONS)), len(body))
    late = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body[first:])
    return body[max(first + late, 1) :]


@dataclass(frozen=True)
class _Member:
    """A definition of the module or of a class, by its dotted name."""

    path: str
    node: ast.stmt
    lines: list[str]

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(_WORD.findall("\n".join(self.lines)))


def _members(body: list[ast.stmt], holder: str, lines: list[str]) -> Iterator[_Member]:
    for node in body:
        if isinstance(node, _DEFINITIONS):
            path = f"{holder}.{node.name}".lstrip(".")
            yield _Member(path, node, lines[_first(node) : node.end_lineno])
            if isinstance(node, ast.ClassDef):
                yield from _members(node.body, path, lines)


def _needs(edit: Edit, members: list[_Member]) -> Iterator[str]:
    """Dotted names of the definitions that an edit looks into or at; "" is everything.

    `path.` is a class of which the statements are needed, and none of its definitions.
    """
    if edit.op == "import":
        return
    if edit.op == "define":
        (added,) = ast.parse(textwrap.dedent(edit.code)).body[:1]
        beside = edit.before or edit.after
        if not beside:
            yield from edit.scopes  # it goes last: its neighbour has no name
            return
        for scope in edit.scopes:
            yield from (f"{scope}.{name}".lstrip(".") for name in (beside, added.name))
        return
    classes = {m.path for m in members if isinstance(m.node, ast.ClassDef)}
    wanted = _names(edit)
    for scope in edit.scopes:
        if edit.op not in ANCHORED or (scope and scope not in classes):
            yield scope
            continue
        prefix = scope and f"{scope}."
        yield from {prefix} - {""}
        for member in members:
            if member.path.startswith(prefix) and any(w <= member.words for w in wanted):
                yield member.path


def _names(edit: Edit) -> list[frozenset[str]]:
    """The names in each anchor, and in each statement of our code: code like it has them all."""
    texts = [*edit.satisfied, *(t for a in edit.anchors for t in (a.match, a.code))]
    found = [s for text in texts for s in ast.parse(textwrap.dedent(text).strip()).body]
    return [frozenset(_named(statement)) for statement in found]


def _named(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        for key in ("id", "attr", "arg", "name", "asname", "module"):
            yield from _WORD.findall(getattr(node, key, None) or "")


def _unneeded(members: list[_Member], needed: set[str]) -> Iterator[ast.stmt]:
    gone = ""
    for m in members:
        inside = any(m.path.startswith(f"{n}.") for n in needed if not n.endswith("."))
        if inside or m.path in needed or (gone and m.path.startswith(gone)):
            continue
        if not any(n.startswith(f"{m.path}.") for n in needed):
            gone = f"{m.path}."
            yield m.node


def _first(node: ast.stmt) -> int:
    return min(n.lineno for n in (node, *node.decorator_list)) - 1


def _leave_out(lines: list[str], node: ast.stmt) -> None:
    first = _first(node)
    last = node.end_lineno
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    at = last  # comments further in than the definition are its own
    while at < len(lines) and (_COMMENT.match(lines[at]) or _BLANK.match(lines[at])):
        if _COMMENT.match(lines[at]):
            if len(lines[at]) - len(lines[at].lstrip()) <= len(indent):
                break
            last = at + 1
        at += 1
    end = "\r" if lines[first].endswith("\r") else ""
    lines[first:last] = [f'{indent}"""{end}', *[end] * (last - first - 2), f'"""{end}'][
        : last - first
    ]
    if last - first == 1:
        lines[first] = f'{indent}""{end}'
