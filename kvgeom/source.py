"""One Python file as a LibCST tree: its scopes, its lines, and our code at the place it goes."""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from kvgeom import skeleton
from kvgeom.edits import Edit
from kvgeom.match import Canon, Canons, Chain, Shape, ancestors, statements, walk

Definition = cst.FunctionDef | cst.ClassDef
Block = cst.Module | cst.IndentedBlock


class Problem(Exception):
    """Why an edit cannot be made: a sentence, the lines it is about, and what came close."""

    def __init__(self, why: str, lines: tuple[int, ...] = (), near: tuple[str, ...] = ()):
        super().__init__(why)
        self.why, self.lines, self.near = why, lines, near


@dataclass(frozen=True)
class Found:
    """A node and its ancestors, innermost first."""

    node: cst.CSTNode
    chain: Chain

    @property
    def parent(self) -> cst.CSTNode:
        return self.chain[0]


class Source:
    """A parsed file. Immutable: `with_swaps` gives a new one."""

    def __init__(self, module: cst.Module, raw: bytes, pristine: Source | None = None):
        self.module, self.raw = module, raw
        self.canons = pristine.canons if pristine else Canons()
        self.pristine = pristine or self

    @classmethod
    def parse(cls, raw: bytes, edits: Iterable[Edit] | None = None) -> Source:
        """Raises Problem for a file that is not Python. With `edits`, only what they need."""
        try:
            needed = raw if edits is None else skeleton.of(raw, edits)
            return cls(cst.parse_module(needed), raw)
        except (cst.ParserSyntaxError, UnicodeDecodeError, LookupError) as err:
            raise Problem(f"not Python that can be parsed: {str(err).splitlines()[0]}") from None

    def with_swaps(self, swaps: dict[Found, object]) -> Source:
        """The file with each found node replaced by a node or a FlattenSentinel of nodes.

        Only the statements around them are printed, and spliced into the bytes.
        """
        via = {id(a) for found in swaps for a in ancestors(found.chain)}
        swap = _Swap({id(found.node): new for found, new in swaps.items()}, via)
        eol, encoding = self.module.default_newline, self.module.encoding
        text = eol + self.raw.decode(encoding)
        units = [self._unit(found, text) for found in swaps]
        known = {id(unit.node) for unit, _ in units}
        units = [u for u in units if not any(id(a) in known for a in ancestors(u[0].chain))]
        new = {id(unit.node): unit.node.visit(swap) for unit, _ in units}
        module = self.module.visit(_Swap(new, via))
        if not all(old for _, old in units):
            if self.module.bytes != self.raw:
                raise Problem("LibCST does not print this file back byte for byte")
            return Source(module, module.bytes, self.pristine)
        places = {text.index(old): (unit, old) for unit, old in units}
        for at, (unit, old) in sorted(places.items(), reverse=True):
            text = text[:at] + self._print(unit, new[id(unit.node)]) + text[at + len(old) :]
        return Source(module, text[len(eol) :].encode(encoding), self.pristine)

    def _unit(self, found: Found, text: str) -> tuple[Found, str]:
        """The innermost statement around a node that stands once in the file's text, and how it
        stands there; the outermost and "" where none does."""
        at = found
        while at.chain:
            at, found = Found(*at.chain), at
            if isinstance(at.node, Block):
                unit, old = found, self._print(found, found.node)
                if text.find(old) == text.rfind(old) != -1:  # neighbours share a line end
                    return unit, old
        return unit, ""

    def _print(self, found: Found, new: object) -> str:
        """`new` in the place of a found statement, from the line end before it."""
        statements = list(new) if isinstance(new, cst.FlattenSentinel) else [new]
        indent, eol = self.indent_of(found.chain), self.module.default_newline
        if not indent or not statements:
            return eol + "".join(map(self.module.code_for_node, statements))
        return self.module.code_for_node(cst.IndentedBlock(body=statements, indent=indent))

    def prints_as_meant(self, found: Found, new: cst.CSTNode) -> bool:
        """Whether `new` in the place of `found` reads back as itself, with no parentheses added."""
        kinds = (cst.BaseSmallStatement, cst.BaseCompoundStatement)
        chain = found.chain
        while not isinstance(chain[0], kinds):
            chain = chain[1]
        via = {id(a) for a in ancestors(found.chain)}
        statement = chain[0].visit(_Swap({id(found.node): new}, via))
        try:
            read = cst.parse_module(self.module.code_for_node(statement))
        except cst.ParserSyntaxError:
            return False
        return self.canons(read) == ("[", self.canons(statement))

    # scopes

    def scopes(self, dotted: str) -> list[Found]:
        """Every class or function of that dotted name; "" is the module."""
        found = [Found(self.module, ())]
        for name in filter(None, dotted.split(".")):
            found = [d for s in found for d in self.definitions(s) if d.node.name.value == name]
        return found

    def scope(self, dotted: str) -> Found:
        found = self.scopes(dotted)
        if len(found) != 1:
            raise Problem(
                f"scope '{dotted}' found {len(found)} times, wanted once",
                self.lines([f.node for f in found]),
                self._named_like(dotted),
            )
        return found[0]

    def definitions(self, scope: Found) -> list[Found]:
        """The classes and functions directly in a scope, those under an `if` or `try` included."""
        out, todo = [], [Found(scope.node.body, (scope.node, scope.chain))]
        if isinstance(scope.node, cst.Module):
            todo = [scope]
        while todo:
            at = todo.pop(0)
            for child in _nested(at.node):
                found = Found(child, (at.node, at.chain))
                (out if isinstance(child, Definition) else todo).append(found)
        return out

    def _named_like(self, dotted: str) -> tuple[str, ...]:
        leaf, scored = dotted.rsplit(".", 1)[-1], []
        for path, line in self.pristine._lines_of_definitions:
            ratio = SequenceMatcher(None, leaf, path.rsplit(".", 1)[-1]).ratio()
            scored.append((ratio, path, line))
        best = sorted((s for s in scored if s[0] > 0.6), key=lambda s: (-s[0], s[1]))[:4]
        return tuple(f"line {line}: {path}" for _, path, line in best)

    @cached_property
    def _lines_of_definitions(self) -> list[tuple[str, int]]:
        return skeleton.lines_of_definitions(self.raw)

    # anchors

    def find(self, scope: Found, shape: Shape, as_statement: bool) -> list[Found]:
        return [
            Found(node, chain)
            for node, chain in walk(scope.node, scope.chain)
            if node is not scope.node and shape.matches(node, self.canons, as_statement)
        ]

    def siblings(self, found: Found) -> tuple[list[Canon], int]:
        """The statements beside a found statement as structural forms, and its index there."""
        suites = (cst.Module, cst.IndentedBlock, cst.SimpleStatementSuite)
        block = next(a for a in ancestors(found.chain) if isinstance(a, suites))
        nodes = statements(block)
        return [self.canons(n) for n in nodes], [n is found.node for n in nodes].index(True)

    def line_of(self, found: Found) -> Found:
        """The node that a statement may be inserted beside; Problem where it shares its line."""
        if isinstance(found.parent, cst.SimpleStatementLine):
            line = Found(found.parent, found.chain[1])
            if len(line.node.body) == 1:
                return line
        elif isinstance(found.parent, Block):
            return found
        raise Problem("the anchor statement shares its line", self.lines([found.node]))

    def near(self, scope: Found, shapes: list[Shape]) -> tuple[str, ...]:
        """The statements of a scope whose text comes closest to the shapes."""
        scored = []
        for node, _ in walk(scope.node):
            if not isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                continue
            text = " ".join(self.module.code_for_node(node).split())[:120]
            ratio = max(SequenceMatcher(None, s.text, text).ratio() for s in shapes)
            if ratio > 0.5:
                scored.append((ratio, text, node))
        best = sorted(scored, key=lambda s: -s[0])[:3]
        return tuple(f"line {self.lines([n])[0]}: {text[:88]}" for _, text, n in best)

    # lines

    @cached_property
    def _positions(self) -> dict:
        return MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)

    def lines(self, nodes: list[cst.CSTNode]) -> tuple[int, ...]:
        """First lines, in the file as it was found; nodes of ours get the line they have now."""
        out = []
        for n in nodes:
            known = self.pristine._positions
            out.append((known if n in known else self._positions)[n].start.line)
        return tuple(out)

    # our code

    def indent_of(self, chain: Chain) -> str:
        """The indentation of a statement with these ancestors."""
        blocks = [a for a in ancestors(chain) if isinstance(a, cst.IndentedBlock)]
        default = self.module.default_indent
        return "".join(default if b.indent is None else b.indent for b in reversed(blocks))

    def code(self, text: str, indent: str) -> list[cst.BaseStatement]:
        """Our code as statements that print right at `indent` in this file."""
        text = textwrap.dedent(text).strip("\n")
        kept = _lines_inside_strings(text)
        out = []
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip() and number not in kept:
                lead = re.match(r"(?:    )*", line).end()
                line = indent + self.module.default_indent * (lead // 4) + line[lead:]
            out.append(line)
        text = "\n".join([*(["if 1:"] if indent else []), *out, ""])
        parsed = cst.parse_module(text.replace("\n", self.module.default_newline))
        if indent:
            return list(parsed.body[0].body.body)
        first = parsed.body[0]
        return [with_leading(first, [*parsed.header, *first.leading_lines]), *parsed.body[1:]]


class _Swap(cst.CSTTransformer):
    """Replaces nodes by identity; visits nothing but the way to them."""

    def __init__(self, swaps: dict[int, object], via: set[int]):
        super().__init__()
        self.swaps, self.via = swaps, via

    def on_visit(self, node: cst.CSTNode) -> bool:
        return id(node) in self.via

    def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> object:
        return self.swaps.get(id(original), updated)


def with_leading(statement: cst.BaseStatement, lines: list[cst.EmptyLine]) -> cst.BaseStatement:
    return statement.with_changes(leading_lines=lines)


def split_leading(statement: cst.BaseStatement) -> tuple[list, list]:
    """A statement's leading lines: the blank ones on top, and the rest from its first comment."""
    lines = list(statement.leading_lines)
    blank = next((i for i, line in enumerate(lines) if line.comment), len(lines))
    return lines[:blank], lines[blank:]


def _nested(node: cst.CSTNode) -> list[cst.CSTNode]:
    """What may hold definitions directly under a block or a compound statement."""
    if isinstance(node, (cst.Module, cst.IndentedBlock)):
        return [s for s in node.body if isinstance(s, cst.BaseCompoundStatement)]
    parts = [getattr(node, n, None) for n in ("body", "orelse", "finalbody")]
    parts += getattr(node, "handlers", ())
    return [p for p in parts if isinstance(p, cst.CSTNode)]


def _lines_inside_strings(text: str) -> set[int]:
    """Lines that begin inside one string which is no docstring: moving them would change it."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    kept: set[int] = set()
    starts: list[int] = []  # of f-strings, which are several tokens from Python 3.12 on
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("STRING", "FSTRING_START"):
            starts.append(token.start[0])
        if kind in ("STRING", "FSTRING_END"):
            kept.update(range(starts.pop() + 1, token.end[0] + 1))
    return kept - docstrings
