"""The edits of one SGLang file, as they stand in `<name>.py.edits.toml`.

    [[edit]]
    pr = "draft-pool-page"      the entry of series.toml that it belongs to
    id = "pool-page-size"       its name, once in this file
    op = "body"                 one of OPS
    in = "Class.method"         scope, or a list of scopes; without it the module
    at = "f(..., page=...)"     anchor shape, or alternatives: a list of shapes or {match, code}
    code = "..."                our code (kwarg: the value; import: the statement; delete: none)
    name = "page"               kwarg: the keyword
    after = "other"             define: the definition it goes next to (or `before`)
    satisfied = "..."           shape, or shapes, of code that already does it: nothing to apply
    count = 1                   how often the anchor matches in each scope
    when = ">=0.5.19"           releases it is for
    group = "page"              one member of a group must be for every supported release

Shapes are described in kvgeom/match.py. An unknown key is an error.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

ANCHORED = ("insert_after", "insert_before", "replace", "kwarg", "delete")
OPS = ("body", "define", *ANCHORED, "import")
_KEYS = {
    "pr", "id", "op", "in", "at", "code", "name", "before", "after", "when", "group", "satisfied",
    "count",
}  # fmt: skip
_NEEDS = {op: {"at"} for op in ANCHORED} | {"body": {"in"}, "kwarg": {"at", "name"}}
_ALLOWED = {
    "body": {"in", "satisfied"},
    "define": {"in", "before", "after", "satisfied"},
    "kwarg": {"in", "at", "count", "name", "satisfied"},
    "import": set(),
} | {op: {"in", "at", "count", "satisfied"} for op in ANCHORED if op != "kwarg"}


@dataclass(frozen=True)
class Anchor:
    match: str
    code: str


@dataclass(frozen=True)
class Edit:
    """One edit. `file` is the repository path of the SGLang file it changes."""

    file: str
    pr: str
    id: str
    op: str
    code: str
    scopes: tuple[str, ...]
    anchors: tuple[Anchor, ...]
    satisfied: tuple[str, ...]
    name: str
    before: str
    after: str
    count: int
    when: SpecifierSet
    group: str

    def live(self, release: Version) -> bool:
        """Whether the edit is for this release (pre-releases and dev builds included)."""
        return self.when.contains(release, prereleases=True)


def load(file: str, text: str) -> tuple[list[Edit], list[str]]:
    """The edits of one .edits.toml for the SGLang file `file`, and every error in it."""
    where = f"{file}.edits.toml"
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        return [], [f"{where}: {err}"]
    errors = [f"{where}: unknown key '{k}' (only [[edit]])" for k in data if k != "edit"]
    tables = data.get("edit", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        return [], [*errors, f"{where}: edits are written as [[edit]]"]
    edits, seen = [], set()
    for number, table in enumerate(tables, start=1):
        label = f"{where}: edit '{table.get('id', f'number {number}')}'"
        found = _errors(table)
        if not found and table["id"] in seen:
            found = ["its id is there twice"]
        errors += [f"{label}: {e}" for e in found]
        if not found:
            seen.add(table["id"])
            edits.append(_edit(file, table))
    return edits, errors


def _list(value: object) -> list:
    return value if isinstance(value, list) else [value]


def _edit(file: str, t: dict) -> Edit:
    anchors = [a if isinstance(a, dict) else {"match": a} for a in _list(t.get("at", []))]
    return Edit(
        file=file,
        pr=t["pr"],
        id=t["id"],
        op=t["op"],
        code=t.get("code", ""),
        scopes=tuple(_list(t.get("in", ""))),
        anchors=tuple(Anchor(a["match"], a.get("code", t.get("code", ""))) for a in anchors),
        satisfied=tuple(_list(t.get("satisfied", []))),
        name=t.get("name", ""),
        before=t.get("before", ""),
        after=t.get("after", ""),
        count=t.get("count", 1),
        when=SpecifierSet(t.get("when", "")),
        group=t.get("group", ""),
    )


def _errors(t: dict) -> list[str]:
    """Every error in one [[edit]] table."""
    out = [f"unknown key '{k}'" for k in t if k not in _KEYS]
    out += [f"'{k}' is missing" for k in ("pr", "id", "op") if k not in t]
    for key in _KEYS - {"in", "at", "satisfied", "count"}:
        if key in t and (not isinstance(t[key], str) or not t[key].strip() and key != "when"):
            out.append(f"'{key}' must be text that is not empty")
    for key in ("in", "satisfied"):
        if not all(isinstance(s, str) for s in _list(t.get(key, ""))):
            out.append(f"'{key}' must be text or a list of texts")
    if not isinstance(t.get("count", 1), int) or isinstance(t.get("count"), bool):
        out.append("'count' must be a whole number")
    elif t.get("count", 1) < 1:
        out.append(f"'count' must be at least 1, not {t['count']}")
    if out:
        return out
    op = t["op"]
    if op not in OPS:
        return [f"unknown op '{op}' ({' | '.join(OPS)})"]
    common = {"pr", "id", "op", "when", "group"} | (set() if op == "delete" else {"code"})
    extra = set(t) - common - _ALLOWED[op]
    out += [f"'{k}' means nothing for op '{op}'" for k in sorted(extra)]
    out += [f"op '{op}' needs '{k}'" for k in sorted(_NEEDS.get(op, set()) - set(t))]
    if "before" in t and "after" in t:
        out.append("'before' and 'after' exclude each other")
    try:
        SpecifierSet(t.get("when", ""))
    except InvalidSpecifier:
        out.append(f"'when' is not a release range: {t['when']!r}")
    return out + _shape_errors(t) + ([] if op == "delete" else _code_errors(t))


def _shape_errors(t: dict) -> list[str]:
    from kvgeom.match import parse_shape

    out, shapes = [], list(_list(t.get("satisfied", [])))
    for anchor in _list(t.get("at", [])):
        if isinstance(anchor, dict):
            out += [f"unknown key '{k}' in 'at'" for k in anchor if k not in ("match", "code")]
            anchor = anchor.get("match")
        shapes.append(anchor)
    if "at" in t and not _list(t["at"]):
        out.append("'at' is empty")
    for shape in shapes:
        if not isinstance(shape, str):
            out.append("each of 'at' is a shape or {match, code}")
            continue
        try:
            parse_shape(shape)
        except ValueError as err:
            out.append(str(err))
    return out


def _code_errors(t: dict) -> list[str]:
    codes = [a.get("code", t.get("code")) for a in _list(t.get("at", [])) if isinstance(a, dict)]
    codes += [t.get("code")] if not codes or any(isinstance(a, str) for a in _list(t["at"])) else []
    return [why for code in codes for why in [_code_error(t["op"], code)] if why]


def _code_error(op: str, code: object) -> str:
    if not isinstance(code, str) or not code.strip():
        return "'code' is missing"
    text = textwrap.dedent(code).strip("\n")
    try:
        body = ast.parse(text, mode="eval" if op == "kwarg" else "exec").body
    except SyntaxError as err:
        return f"'code' is not Python: {err.msg}, line {err.lineno}"
    if op == "kwarg":
        return ""
    if text.split("\n")[-1].lstrip().startswith("#"):
        return "'code' ends with a comment, which would belong to no statement"
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if op == "define" and not (len(body) == 1 and isinstance(body[0], definitions)):
        return "'code' of a define is one function or class"
    if op == "import":
        if not all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in body):
            return "'code' of an import is import statements"
        if any(isinstance(s, ast.ImportFrom) and (s.level or s.names[0].name == "*") for s in body):
            return "'code' of an import names absolute modules and no '*'"
    return ""
