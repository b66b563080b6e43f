"""The `import` op: adds a top-level import where an isort-clean file (profile black) has it."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass

import libcst as cst
from libcst.helpers import get_full_name_for_node

from kvgeom.source import Found, Problem, Source, split_leading, with_leading

_WIDTH = 88  # SGLang formats with black's line length
_FIRST_PARTY = "sglang"


@dataclass(frozen=True)
class _Line:
    """A top-level line that is one import statement."""

    index: int
    line: cst.SimpleStatementLine

    @property
    def statement(self) -> cst.Import | cst.ImportFrom:
        return self.line.body[0]

    @property
    def module(self) -> str:
        return _module(self.statement)

    @property
    def rank(self) -> tuple:
        """Sorts as isort does: section, `import` before `from`, module."""
        return _section(self.module), isinstance(self.statement, cst.ImportFrom), _key(self.module)


def add_import(source: Source, code: str) -> Source:
    """`source` with the imports of `code`; the same object where it has them all already."""
    for line in cst.parse_module(textwrap.dedent(code).strip() + "\n").body:
        for wanted in line.body:
            source = _add(source, wanted)
    return source


def _add(source: Source, wanted: cst.Import | cst.ImportFrom) -> Source:
    lines = _import_lines(source.module)
    have = {b for known in lines for b in _bindings(known.statement)}
    missing = [a for a in wanted.names if _binding(wanted, a) not in have]
    if not missing:
        return source
    same = [
        x
        for x in lines
        if isinstance(wanted, cst.ImportFrom)
        and isinstance(x.statement, cst.ImportFrom)
        and x.module == _module(wanted)
        and not any(a.asname for a in [*_aliases(x.statement), *missing])
    ]
    if same:
        line = same[0].line
        for alias in missing:
            line = _extend(source.module, line, alias.name.value)
        return source.with_swaps({_top_level(source, same[0].line): line})
    last = missing[-1].with_changes(comma=wanted.names[-1].comma)
    return _place(source, lines, wanted.with_changes(names=[*missing[:-1], last]))


def _top_level(source: Source, statement: cst.BaseStatement) -> Found:
    return Found(statement, (source.module, ()))


def _import_lines(module: cst.Module) -> list[_Line]:
    """Top-level imports above the first definition; those under `if TYPE_CHECKING` do not count."""
    out = []
    for index, line in enumerate(module.body):
        if isinstance(line, (cst.FunctionDef, cst.ClassDef)):
            break
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
            continue
        statement = line.body[0]
        absolute = isinstance(statement, cst.ImportFrom) and not statement.relative
        if absolute or isinstance(statement, cst.Import):
            out.append(_Line(index, line))
    return out


def _place(source: Source, lines: list[_Line], statement: cst.BaseSmallStatement) -> Source:
    """A new line for `statement` in its place of the order."""
    mine = _Line(0, cst.SimpleStatementLine([statement]))
    section, is_from, _ = mine.rank
    group = [x for x in lines if x.rank[:2] == (section, is_from)]
    after = next((x for x in group if x.rank > mine.rank), None)
    before = group[-1] if group and not after else None
    if not group:
        after = next((x for x in lines if x.rank > mine.rank), None)
        before = None if after else (lines[-1] if lines else None)
    if after:
        blank, rest = split_leading(after.line)
        gap = [_blank()] if after.rank[0] != section else []
        earlier = [x.rank[0] for x in lines if x.index < after.index]
        if gap and earlier:  # the blank line that was above `after` belongs below us
            blank = [] if earlier[-1] == section else [_blank()]
        pair = [with_leading(mine.line, blank), with_leading(after.line, [*gap, *rest])]
        return source.with_swaps({_top_level(source, after.line): cst.FlattenSentinel(pair)})
    if before:
        gap = [] if before.rank[0] == section else [_blank()]
        pair = [before.line, with_leading(mine.line, gap)]
        return source.with_swaps({_top_level(source, before.line): cst.FlattenSentinel(pair)})
    return _only_import(source, mine.line)


def _only_import(source: Source, line: cst.SimpleStatementLine) -> Source:
    """The only import of a file goes below its docstring."""
    has_docstring = source.module.get_docstring() is not None
    below = source.module.body[int(has_docstring) :]
    if not below:
        raise Problem("the file has no statement that an import could stand above")
    blank, rest = split_leading(below[0])
    line = with_leading(line, (blank[:1] or [_blank()]) if has_docstring else [])
    pair = [line, with_leading(below[0], [*(blank or [_blank()]), *rest])]
    return source.with_swaps({_top_level(source, below[0]): cst.FlattenSentinel(pair)})


def _extend(module: cst.Module, line: cst.SimpleStatementLine, name: str) -> cst.BaseStatement:
    """`from m import a` with one more name in its place."""
    statement = line.body[0]
    aliases = list(statement.names)
    at = next((i for i, a in enumerate(aliases) if _name_key(a.name.value) > _name_key(name)), None)
    multi = bool(statement.lpar) and isinstance(
        statement.lpar.whitespace_after, cst.ParenthesizedWhitespace
    )
    if multi:
        space = statement.lpar.whitespace_after
        space = space.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
    else:
        space = cst.SimpleWhitespace(" ")
    between = cst.Comma(whitespace_after=space)
    new = cst.ImportAlias(cst.Name(name), comma=between)
    if at is None:
        ending = aliases[-1].comma
        aliases[-1] = aliases[-1].with_changes(comma=between)
        aliases.append(new.with_changes(comma=ending))
    else:
        aliases.insert(at, new)
    longer = line.with_changes(body=[statement.with_changes(names=aliases)])
    text = module.code_for_node(longer.with_changes(leading_lines=[])).split("  #")[0].rstrip()
    return longer if multi or len(text) <= _WIDTH else _wrapped(module, longer)


def _wrapped(module: cst.Module, line: cst.SimpleStatementLine) -> cst.BaseStatement:
    names = "".join(f"    {a.name.value},\n" for a in line.body[0].names)
    text = f"from {_module(line.body[0])} import (\n{names})\n"
    text = text.replace("\n", module.default_newline)
    wrapped = cst.parse_module(text, config=module.config_for_parsing).body[0]
    return line.with_changes(body=wrapped.body)


def _blank() -> cst.EmptyLine:
    return cst.EmptyLine(indent=False)


def _module(statement: cst.Import | cst.ImportFrom) -> str:
    if isinstance(statement, cst.ImportFrom):
        return get_full_name_for_node(statement.module) or ""
    return get_full_name_for_node(statement.names[0].name) or ""


def _aliases(statement: cst.Import | cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(statement.names, cst.ImportStar) else list(statement.names)


def _binding(statement: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> tuple:
    module = _module(statement) if isinstance(statement, cst.ImportFrom) else ""
    asname = alias.asname.name.value if alias.asname else ""
    return module, get_full_name_for_node(alias.name), asname


def _bindings(statement: cst.Import | cst.ImportFrom) -> list[tuple]:
    return [_binding(statement, a) for a in _aliases(statement)]


def _section(module: str) -> int:
    root = module.split(".")[0]
    if root == "__future__":
        return 0
    if root in sys.stdlib_module_names:
        return 1
    return 3 if root == _FIRST_PARTY else 2


def _natural(text: str) -> list:
    return [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", text.lower())]


def _key(module: str) -> list:
    return _natural(module)


def _name_key(name: str) -> tuple:
    """CONSTANTS, then Classes, then the rest, as isort orders the names of one import."""
    constant = name.isupper() and len(name) > 1
    return (0 if constant else 1 if name[:1].isupper() else 2), _natural(name)
