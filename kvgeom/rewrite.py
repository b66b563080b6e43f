"""Carries out one edit on a parsed file: finds the place, tells what already stands, rewrites."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import libcst as cst

from kvgeom import anchored
from kvgeom.edits import Edit
from kvgeom.imports import add_import
from kvgeom.match import parse_shape
from kvgeom.source import Found, Problem, Source, split_leading, with_leading


class State(StrEnum):
    """Where one edit stands on a tree."""

    TO_APPLY = "to apply"
    APPLIED = "applied"
    UPSTREAM = "already upstream"
    OTHER_RELEASE = "not for this release"


@dataclass(frozen=True)
class Outcome:
    """What an edit comes to. `sites` are the anchors in the file as the edit met it.

    `beside`: the one site is only the neighbour of a definition that is added.
    """

    state: State
    source: Source
    sites: tuple[Found, ...] = ()
    beside: bool = False


def evaluate(source: Source, edit: Edit, siblings: tuple[Edit, ...] = ()) -> Outcome:
    """Carry out `edit`. `siblings` are the file's edits, whose code may stand beside an anchor.

    Raises Problem when an anchor is not there exactly as often as the edit says.
    """
    if edit.op == "import":
        imported = add_import(source, edit.code)
        return Outcome(State.APPLIED if imported is source else State.TO_APPLY, imported)
    if edit.op == "define":
        return _define(source, edit)
    outcomes = []
    for dotted in edit.scopes:
        op = _body if edit.op == "body" else _anchored
        outcomes.append(op(source, edit, source.scope(dotted), siblings))
        source = outcomes[-1].source
    states = {o.state for o in outcomes}
    state = next(s for s in (State.TO_APPLY, State.UPSTREAM, State.APPLIED) if s in states)
    return Outcome(state, source, tuple(s for o in outcomes for s in o.sites))


def _satisfied(source: Source, edit: Edit, scope: Found) -> bool:
    shapes = [parse_shape(s) for s in edit.satisfied]
    return any(source.find(scope, s, as_statement=False) for s in shapes)


# body


def _body(source: Source, edit: Edit, scope: Found, _: tuple[Edit, ...]) -> Outcome:
    function = scope.node
    if not isinstance(function, cst.FunctionDef):
        raise Problem("the scope of a body is not a function", source.lines([function]))
    if _satisfied(source, edit, scope):
        return Outcome(State.UPSTREAM, source, (scope,))
    below = (function, scope.chain)
    indented = isinstance(function.body, cst.IndentedBlock)
    own = function.body.indent if indented else None
    default = source.module.default_indent
    new = source.code(edit.code, source.indent_of(below) + (default if own is None else own))
    old = list(function.body.body) if indented else []
    if function.get_docstring() is not None and old and not _has_docstring(new):
        new = [old[0], *new]
    if indented:
        lines, comment = list(function.body.footer), 0
        comment = max((i + 1 for i, line in enumerate(lines) if line.comment), default=0)
        block = function.body.with_changes(body=new, footer=lines[comment:])
    else:
        block = cst.IndentedBlock(body=new)
    if source.canons(block) == source.canons(function.body):
        return Outcome(State.APPLIED, source, (scope,))
    swapped = source.with_swaps({scope: function.with_changes(body=block)})
    return Outcome(State.TO_APPLY, swapped, (scope,))


def _has_docstring(body: list[cst.BaseStatement]) -> bool:
    return cst.Module(body=body).get_docstring() is not None


# define


def _define(source: Source, edit: Edit) -> Outcome:
    if len(edit.scopes) != 1:
        raise Problem("a define goes into one scope")
    holder = source.scope(edit.scopes[0])
    if _satisfied(source, edit, holder):
        return Outcome(State.UPSTREAM, source)
    name = _defined_name(source.code(edit.code, "")[0])
    members = source.definitions(holder)
    have = [d for d in members if d.node.name.value == name]
    if len(have) > 1:
        lines = source.lines([d.node for d in have])
        raise Problem(f"'{name}' is defined {len(have)} times", lines)
    if have:
        new = source.code(edit.code, source.indent_of(have[0].chain))[0]
        if source.canons(new) == source.canons(have[0].node):
            return Outcome(State.APPLIED, source, (have[0],))
        new = with_leading(new, [*have[0].node.leading_lines, *split_leading(new)[1]])
        return Outcome(State.TO_APPLY, source.with_swaps({have[0]: new}), (have[0],))
    neighbour = edit.before or edit.after
    beside = [d for d in members if d.node.name.value == neighbour] if neighbour else members[-1:]
    if len(beside) != 1:
        names = ", ".join(d.node.name.value for d in members[:8])
        raise Problem(
            f"neighbour '{neighbour}' found {len(beside)} times, wanted once",
            source.lines([d.node for d in beside]),
            (f"definitions there: {names}",) if names else (),
        )
    return Outcome(State.TO_APPLY, _beside(source, beside[0], edit), (beside[0],), beside=True)


def _beside(source: Source, at: Found, edit: Edit) -> Source:
    """A new definition next to the one at `at`, with the usual blank lines between them."""
    new = source.code(edit.code, source.indent_of(at.chain))[0]
    in_module = isinstance(at.parent, cst.Module)
    gap = [cst.EmptyLine(indent=False) for _ in range(2 if in_module else 1)]
    comments = split_leading(new)[1]
    if not edit.before:
        pair = [at.node, with_leading(new, [*gap, *comments])]
    else:
        blank, rest = split_leading(at.node)
        pair = [with_leading(new, [*blank, *comments]), with_leading(at.node, [*gap, *rest])]
    return source.with_swaps({at: cst.FlattenSentinel(pair)})


def _defined_name(statement: cst.BaseStatement) -> str:
    return statement.name.value


# insert_after, insert_before, replace, kwarg, delete


def _anchored(source: Source, edit: Edit, scope: Found, siblings: tuple[Edit, ...]) -> Outcome:
    if _satisfied(source, edit, scope):
        return Outcome(State.UPSTREAM, source)
    hits, done = anchored.find(source, edit, scope, siblings)
    if not hits and (edit.op == "delete" or len(done) >= edit.count):
        return Outcome(State.APPLIED, source, tuple(done))
    if len(hits) != edit.count:
        raise anchored.miscount(source, edit, scope, [h.found for h in hits], done)
    swapped = source.with_swaps(anchored.rewrite(source, edit, hits))
    return Outcome(State.TO_APPLY, swapped, tuple(h.found for h in hits))
