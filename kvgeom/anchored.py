"""The ops with an anchor: insert_after, insert_before, replace, kwarg, delete.

Each op has two halves: where its result already stands, and the rewrite of one anchor. A delete
leaves nothing that could stand: it is done where its anchor is gone. That is no way past a drifted
anchor, as its PR is then partly in place, which the plan refuses.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import libcst as cst

from kvgeom.edits import Anchor, Edit
from kvgeom.match import Canon, ancestors, parse_shape, walk
from kvgeom.source import Found, Problem, Source, split_leading, with_leading

Swaps = dict[Found, object]


@dataclass(frozen=True)
class Hit:
    """A node that an anchor matches, and the code that goes with that anchor."""

    found: Found
    anchor: Anchor


def find(
    source: Source, edit: Edit, scope: Found, siblings: tuple[Edit, ...]
) -> tuple[list[Hit], list[Found]]:
    """The anchors still to edit, each once, and the places where the edit's result stands."""
    hits: dict[int, Hit] = {}
    done: dict[int, Found] = {}
    for anchor in edit.anchors:
        as_statement = edit.op.startswith(("insert", "delete")) or (
            edit.op == "replace" and not _is_expression(anchor.code)
        )
        found = source.find(scope, parse_shape(anchor.match), as_statement)
        for f in found:
            hits.setdefault(id(f.node), Hit(f, anchor))
        if edit.op == "replace":
            stands = _replaced(source, scope, anchor.code)
        elif edit.op == "delete":
            stands = []
        elif edit.op == "kwarg":
            stands = [f for f in found if _has_argument(source, f, edit.name, anchor.code)]
        else:
            stands = [f for f in found if _stands_beside(source, edit, f, anchor, siblings)]
        done |= {id(f.node): f for f in stands}
    left = [
        hit
        for key, hit in hits.items()
        if key not in done and not any(id(a) in done for a in ancestors(hit.found.chain))
    ]
    return left, list(done.values())


def rewrite(source: Source, edit: Edit, hits: list[Hit]) -> Swaps:
    op = {"replace": _replace, "kwarg": _kwarg, "delete": _delete}.get(edit.op, _insert)
    swaps: Swaps = {}
    for hit in hits:
        if any(a is other.found.node for other in hits for a in ancestors(hit.found.chain)):
            raise Problem("one anchor lies inside another", source.lines([hit.found.node]))
        swaps |= op(source, edit, hit.found, hit.anchor.code)
    return swaps


def miscount(
    source: Source, edit: Edit, scope: Found, hits: list[Found], done: list[Found]
) -> Problem:
    name = "<module>" if isinstance(scope.node, cst.Module) else scope.node.name.value
    why = f"anchor found {len(hits)} times in '{name}', wanted {edit.count}"
    if done:
        why += f" (and its result stands {len(done)} times)"
    near = () if hits else source.near(scope, [parse_shape(a.match) for a in edit.anchors])
    return Problem(why, source.lines([f.node for f in hits or done]), near)


def _is_expression(code: str) -> bool:
    try:
        cst.parse_expression(textwrap.dedent(code).strip())
    except cst.ParserSyntaxError:
        return False
    return True


def _forms(source: Source, code: str, chain: tuple) -> list[Canon]:
    """The structural forms of our statements, as they would stand with these ancestors."""
    body = source.code(code, source.indent_of(chain))
    return list(source.canons(cst.Module(body=body))[1:])


# insert


def _stands_beside(
    source: Source, edit: Edit, found: Found, anchor: Anchor, siblings: tuple[Edit, ...]
) -> bool:
    """Whether our statements stand beside the anchor, with only other edits' code between."""
    if not _in_block(found.chain):
        return False
    beside, index = source.siblings(found)
    want = _forms(source, anchor.code, found.chain)
    run = beside[index + 1 :]
    if edit.op == "insert_before":
        want, run = want[::-1], beside[:index][::-1]
    ours: list[Canon] | None = None
    for start in range(len(run)):
        if run[start : start + len(want)] == want:
            return True
        if ours is None:
            codes = {a.code for e in siblings if e.op.startswith("insert") for a in e.anchors}
            ours = [c for code in codes for c in _forms(source, code, found.chain)]
        if run[start] not in ours:
            return False
    return False


def _insert(source: Source, edit: Edit, found: Found, code: str) -> Swaps:
    line = source.line_of(found)
    new = source.code(code, source.indent_of(line.chain))
    if edit.op == "insert_after":
        return {line: cst.FlattenSentinel([line.node, *new])}
    blank, rest = split_leading(line.node)
    new[0] = with_leading(new[0], [*blank, *new[0].leading_lines])
    return {line: cst.FlattenSentinel([*new, with_leading(line.node, rest)])}


# replace


def _replaced(source: Source, scope: Found, code: str) -> list[Found]:
    """The places of the scope where `code` stands as it is."""
    if _is_expression(code):
        want = source.canons(cst.parse_expression(textwrap.dedent(code).strip()))
        return [
            Found(node, chain)
            for node, chain in walk(scope.node, scope.chain)
            if isinstance(node, cst.BaseExpression) and source.canons(node) == want
        ]
    out = []
    kinds = (cst.BaseSmallStatement, cst.BaseCompoundStatement)
    first = _forms(source, code, ())[0][0]
    wanted: dict[str, list[Canon]] = {}
    for node, chain in walk(scope.node, scope.chain):
        if not isinstance(node, kinds) or type(node).__name__ != first or not _in_block(chain):
            continue
        indent = source.indent_of(chain)
        if indent not in wanted:
            wanted[indent] = _forms(source, code, chain)
        start, want = Found(node, chain), wanted[indent]
        beside, index = source.siblings(start)
        if beside[index : index + len(want)] == want:
            out.append(start)
    return out


def _in_block(chain: tuple) -> bool:
    """Whether a statement stands in a block of its own right, not as an `elif`."""
    return not isinstance(chain[0], cst.If)


def _replace(source: Source, edit: Edit, found: Found, code: str) -> Swaps:
    if _is_expression(code):
        return {found: _expression(source, found, code)}
    if isinstance(found.node, cst.BaseSmallStatement) and not _alone(found):
        new = source.code(code, "")
        if len(new) == 1 and isinstance(new[0], cst.SimpleStatementLine):
            *head, last = new[0].body
            last = last.with_changes(semicolon=found.node.semicolon)
            return {found: cst.FlattenSentinel([*head, last])}
    line = source.line_of(found)
    return {line: _in_place(source, line, code)}


def _alone(found: Found) -> bool:
    return isinstance(found.parent, cst.SimpleStatementLine) and len(found.parent.body) == 1


def _in_place(source: Source, line: Found, code: str) -> cst.FlattenSentinel:
    """Our statements for a whole line or compound statement; the comments above it stay."""
    new = source.code(code, source.indent_of(line.chain))
    simple = cst.SimpleStatementLine
    if len(new) == 1 and isinstance(new[0], simple) and isinstance(line.node, simple):
        new[0] = new[0].with_changes(trailing_whitespace=line.node.trailing_whitespace)
    new[0] = with_leading(new[0], [*line.node.leading_lines, *new[0].leading_lines])
    return cst.FlattenSentinel(new)


def _expression(source: Source, found: Found, code: str) -> cst.BaseExpression:
    """Our expression in the place of the found one, in parentheses where it needs them."""
    config = source.module.config_for_parsing
    new = cst.parse_expression(textwrap.dedent(code).strip(), config=config)
    left, right = getattr(found.node, "lpar", ()), getattr(found.node, "rpar", ())
    new = new.with_changes(lpar=[*left, *new.lpar], rpar=[*new.rpar, *right])
    if source.prints_as_meant(found, new):
        return new
    return new.with_changes(lpar=[cst.LeftParen(), *new.lpar], rpar=[*new.rpar, cst.RightParen()])


# delete


def _delete(source: Source, edit: Edit, found: Found, _: str) -> Swaps:
    """The statement goes, and with it the comments and blank lines above it."""
    line = source.line_of(found)
    beside, index = source.siblings(found)
    if len(beside) == 1:
        raise Problem("nothing would be left in its block", source.lines([found.node]))
    return {line: cst.FlattenSentinel([])}


# kwarg


def _argument(call: cst.CSTNode, name: str) -> cst.Arg | None:
    arguments = call.args if isinstance(call, cst.Call) else ()
    return next((a for a in arguments if a.keyword and a.keyword.value == name), None)


def _has_argument(source: Source, found: Found, name: str, code: str) -> bool:
    have = _argument(found.node, name)
    want = source.canons(cst.parse_expression(textwrap.dedent(code).strip()))
    return have is not None and source.canons(have.value) == want


def _kwarg(source: Source, edit: Edit, found: Found, code: str) -> Swaps:
    call = found.node
    if not isinstance(call, cst.Call):
        raise Problem("the anchor of a kwarg is a call", source.lines([call]))
    have = _argument(call, edit.name)
    if have:
        value = Found(have.value, (have, (call, found.chain)))
        return {value: _expression(source, value, code)}
    return {found: _with_argument(source, call, edit.name, code)}


def _with_argument(source: Source, call: cst.Call, name: str, code: str) -> cst.Call:
    """The call with one more keyword at the end, spaced as its other arguments are."""
    config = source.module.config_for_parsing
    value = cst.parse_expression(textwrap.dedent(code).strip(), config=config)
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    if isinstance(value, cst.Tuple) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    new = cst.Arg(value, keyword=cst.Name(name), equal=tight)
    args = list(call.args)
    if args:
        space = call.whitespace_before_args  # a newline where each argument has its own line
        if not isinstance(space, cst.ParenthesizedWhitespace):
            space = cst.SimpleWhitespace(" ")
        new = new.with_changes(
            comma=args[-1].comma, whitespace_after_arg=args[-1].whitespace_after_arg
        )
        args[-1] = args[-1].with_changes(
            comma=cst.Comma(whitespace_after=space), whitespace_after_arg=cst.SimpleWhitespace("")
        )
    return call.with_changes(args=[*args, new])
