"""A file with the definitions that no edit needs left out, so that LibCST has less to parse.

A definition left out becomes a string of as many lines. Line numbers stay what they are, and what
stands before and after it stays apart.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator

from kvgeom.edits import Edit

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMMENT = re.compile(r"[ \t]*#")
_BLANK = re.compile(r"[ \t]*\r?$")


def of(raw: bytes, edits: Iterable[Edit]) -> bytes:
    """A file with only what `edits` look at; the file itself where that is all of it."""
    needed = {path for edit in edits for path in _needs(edit)}
    try:
        text = raw.decode("utf-8")
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return raw
    if "" in needed or "\r" in text.replace("\r\n", "") or "\f" in text:
        return raw  # all of it is needed, or ast counts its lines in another way
    lines = text.split("\n")
    for node in _unneeded(body[1:], "", needed):
        _leave_out(lines, node)
    return "\n".join(lines).encode("utf-8")


def _needs(edit: Edit) -> Iterator[str]:
    """Dotted names of the definitions that an edit looks into or at; "" is everything."""
    if edit.op == "import":
        return
    if edit.op != "define":
        yield from edit.scopes
        return
    (added,) = ast.parse(textwrap.dedent(edit.code)).body[:1]
    beside = edit.before or edit.after
    if not beside:
        yield from edit.scopes  # it goes last: its neighbour has no name
        return
    for scope in edit.scopes:
        yield from (f"{scope}.{name}".lstrip(".") for name in (beside, added.name))


def _unneeded(body: list[ast.stmt], holder: str, needed: set[str]) -> Iterator[ast.stmt]:
    for node in body:
        if not isinstance(node, _DEFINITIONS):
            continue
        path = f"{holder}.{node.name}".lstrip(".")
        if path in needed:
            continue
        if not any(name.startswith(f"{path}.") for name in needed):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _unneeded(node.body, path, needed)


def _leave_out(lines: list[str], node: ast.stmt) -> None:
    first = min(n.lineno for n in (node, *node.decorator_list)) - 1
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
