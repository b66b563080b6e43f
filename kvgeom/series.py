"""The series: the ordered stack of PRs, their edits and their new files, checked on loading.

    series.toml                              [[pr]] id, title, body, files, when, absent, red
    series.lock                              what was reviewed, per release (kvgeom/lock.py)
    python/sglang/.../<name>.py.edits.toml   edits to SGLang's own <name>.py (kvgeom/edits.py)
    python/... and test/...                  files that the series adds, each in one PR's `files`

`python/` and `test/` mirror SGLang's repository.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from kvgeom import edits as edit_files
from kvgeom import lock as lock_file
from kvgeom.edits import Edit
from kvgeom.errors import KvgeomError
from kvgeom.lock import Lock

_SUFFIX = ".edits.toml"
_PR_KEYS = {"id", "title", "body", "files", "when", "absent", "red"}


@dataclass(frozen=True)
class Pr:
    """One entry of the stack. `edits` are in file order, `files` the new files with their bytes.

    `when`: the releases it is for; `absent`: why it is for no other. `red`: the releases on which
    its tests fail without its edits, as tests/ verifies.
    """

    id: str
    title: str
    body: str
    when: SpecifierSet
    absent: str
    red: SpecifierSet | None
    edits: tuple[Edit, ...]
    files: dict[str, bytes]

    def live(self, release: Version) -> bool:
        return self.when.contains(release, prereleases=True)

    def edits_for(self, release: Version) -> list[Edit]:
        return [e for e in self.edits if self.live(release) and e.live(release)]


@dataclass(frozen=True)
class Series:
    root: Path
    prs: tuple[Pr, ...]
    lock: Lock
    cut_from: str = ""  # the id of the whole, where this is only the lower part of a stack

    def upto(self, pr_id: str | None) -> Series:
        """The stack up to and with a PR; "" for none of it, None for all of it."""
        if pr_id is None:
            return self
        count = self.prs.index(self.pr(pr_id)) + 1 if pr_id else 0
        return replace(self, prs=self.prs[:count], cut_from=self.id)

    @cached_property
    def id(self) -> str:
        """Changes with anything that `apply` would write."""
        seen = hashlib.sha256()
        for pr in self.prs:
            new = sorted((p, hashlib.sha256(b).hexdigest()) for p, b in pr.files.items())
            facts = [(*vars(e).values(),) for e in pr.edits]
            seen.update(repr((pr.id, str(pr.when), facts, new)).encode())
        return seen.hexdigest()[:16]

    def pr(self, pr_id: str) -> Pr:
        for pr in self.prs:
            if pr.id == pr_id:
                return pr
        known = ", ".join(p.id for p in self.prs)
        raise KvgeomError(f"no PR '{pr_id}' in the series", f"its PRs: {known}", exit_code=2)


def find_root() -> Path:
    """The repository when kvgeom runs from a checkout, else the series inside the wheel."""
    package = Path(__file__).resolve().parent
    for root in (package.parent, package / "_series"):
        if (root / "series.toml").is_file():
            return root
    raise KvgeomError(
        f"no series.toml beside {package} or in {package / '_series'}",
        "run kvgeom from a checkout of its repository, or install its wheel again",
    )


def load(root: Path | None = None) -> Series:
    """Raises KvgeomError with every error of the series at once."""
    root = root or find_root()
    errors: list[str] = []
    lock = _lock(root)
    tables = _tables(root, errors)
    listed = {f: t["id"] for t in tables for f in t["files"]}
    edits, present = _walk(root, errors)
    ids = {t["id"] for t in tables}
    errors += [
        f"{e.file}.edits.toml: edit '{e.id}' names the PR '{e.pr}', which series.toml lacks"
        for e in edits
        if e.pr not in ids
    ]
    errors += [f"{f}: no PR of series.toml lists this file" for f in present if f not in listed]
    errors += [f"series.toml: PR '{p}' lists {f}, which is missing" for f, p in listed.items()
               if f not in present]  # fmt: skip
    prs = tuple(
        Pr(
            id=t["id"],
            title=t["title"],
            body=t["body"],
            when=SpecifierSet(t.get("when", "")),
            absent=t.get("absent", ""),
            red=SpecifierSet(t["red"]) if "red" in t else None,
            edits=tuple(e for e in edits if e.pr == t["id"]),
            files={f: present[f].read_bytes() for f in t["files"] if f in present},
        )
        for t in tables
    )
    for release in lock.releases:
        errors += release_errors(prs, release)
    if errors:
        raise KvgeomError("the series has errors:\n  " + "\n  ".join(errors))
    return Series(root, prs, lock)


def release_errors(prs: tuple[Pr, ...], release: Version) -> list[str]:
    """A PR that is for the release needs an edit there, and one of each group."""
    out = []
    for pr in (p for p in prs if p.live(release)):
        live = pr.edits_for(release)
        groups = sorted({e.group for e in pr.edits if e.group} - {e.group for e in live})
        out += [f"PR '{pr.id}': group '{g}' has no edit for {release}" for g in groups]
        if not (live or groups) and (pr.edits or not pr.files):
            out.append(f"PR '{pr.id}' has no edit for {release}: say so with 'when' and 'absent'")
    return out


def _lock(root: Path) -> Lock:
    path = root / "series.lock"
    return lock_file.parse(path.read_text("utf-8")) if path.is_file() else Lock()


def _tables(root: Path, errors: list[str]) -> list[dict]:
    """The [[pr]] tables that are sound; the errors of the others go to `errors`."""
    try:
        data = tomllib.loads((root / "series.toml").read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise KvgeomError(f"series.toml cannot be read: {err}") from None
    errors += [f"series.toml: unknown key '{k}'" for k in data if k not in ("upstream", "pr")]
    if data.get("upstream", "sglang") != "sglang":
        errors.append(f"series.toml: upstream is '{data['upstream']}', only 'sglang' is known")
    out, seen, files = [], set(), set()
    for number, table in enumerate(data.get("pr", []), start=1):
        label = f"series.toml: PR '{table.get('id', f'number {number}')}'"
        found = _pr_errors(table)
        if not found:
            found = ["its id is there twice"] if table["id"] in seen else []
            found += [f"{f} is listed twice" for f in table["files"] if f in files]
            seen.add(table["id"])
            files.update(table["files"])
            out.append(table)
        errors += [f"{label}: {e}" for e in found]
    if not data.get("pr"):
        errors.append("series.toml: it lists no PR")
    return out


def _pr_errors(table: dict) -> list[str]:
    out = [f"unknown key '{k}'" for k in table if k not in _PR_KEYS]
    table.setdefault("body", "")
    table.setdefault("files", [])
    for key in ("id", "title"):
        if not isinstance(table.get(key), str) or not table[key].strip():
            out.append(f"'{key}' must be text that is not empty")
    files = table["files"]
    if not isinstance(files, list) or not all(isinstance(f, str) for f in files):
        return [*out, "'files' must be a list of paths"]
    bad = [f for f in files if ".." in f.split("/") or not f.startswith(("python/", "test/"))]
    out += [f"'{f}' is not a path under python/ or test/" for f in bad]
    for key in table.keys() & {"when", "red"}:
        try:
            SpecifierSet(table[key])
        except (InvalidSpecifier, AttributeError, TypeError):
            out.append(f"'{key}' is not a release range: {table[key]!r}")
    absent = table.get("absent", "")
    if not isinstance(absent, str) or ("when" in table) != bool(absent.strip()):
        out.append("'when' and 'absent' go together: 'absent' says why it is for no other release")
    return out


def _walk(root: Path, errors: list[str]) -> tuple[list[Edit], dict[str, Path]]:
    """Every edit, and every new file, under python/ and test/."""
    edits: list[Edit] = []
    new: dict[str, Path] = {}
    for top in ("python", "test"):
        for path in sorted((root / top).rglob("*")):
            name = path.relative_to(root).as_posix()
            if not path.is_file() or "__pycache__" in path.parts:
                continue
            if top == "python" and name.endswith(_SUFFIX):
                found, wrong = edit_files.load(name.removesuffix(_SUFFIX), path.read_text("utf-8"))
                edits += found
                errors += wrong
            else:
                new[name] = path
    return edits, new
