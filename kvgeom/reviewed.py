"""The status of an SGLang whose edited files are known byte for byte, without reading its code.

Such files are a reviewed release's own (pip's RECORD has their hashes), or what apply made of them.
Everything else needs `actions.status`, which plans the stack anew.
"""

from __future__ import annotations

import base64
import csv
import hashlib
from pathlib import Path

from kvgeom import actions, install
from kvgeom.actions import Status, TreeState
from kvgeom.install import Manifest
from kvgeom.lock import UPSTREAM
from kvgeom.plan import Plan, PrPlan, PrState
from kvgeom.series import Pr, Series
from kvgeom.tree import Tree


def status(series: Series, tree: Tree, changed: list[str] | None) -> Status | None:
    """The status, or None where the code has to be read. `changed`: from `changed_files`."""
    if changed is None or tree.release not in series.lock.releases:
        return None
    manifest = install.read_manifest(tree)
    state, files = actions.inspect(series, tree, manifest)
    live = {e.file for pr in series.prs for e in pr.edits_for(tree.release)}
    added = {p for pr in series.prs for p in pr.files if tree.writes(p)}
    present = manifest is None and any(tree.path(p).exists() for p in added)
    if state not in (TreeState.NOT_APPLIED, TreeState.APPLIED) or present or live & {*changed}:
        return None
    prs = tuple(PrPlan(pr, _state(series, tree, pr), (), {}) for pr in series.prs)
    return Status(tree, state, manifest, files, Plan(tree.release, prs, ()), supported=True)


def _state(series: Series, tree: Tree, pr: Pr) -> PrState:
    """Where a PR stands on the release as it was reviewed."""
    if not pr.live(tree.release):
        return PrState.ABSENT
    edits = [e for e in pr.edits_for(tree.release) if e.op != "import"]
    digests = {series.lock.digest(e.file, e.id, tree.release) for e in edits}
    if digests == {UPSTREAM}:
        return PrState.UPSTREAM
    writes = edits or any(tree.writes(path) for path in pr.files)
    return PrState.NOT_APPLIED if writes else PrState.NOT_APPLICABLE


def changed_files(tree: Tree) -> list[str] | None:
    """SGLang's files that are not as the release has them, the series' own changes left out.

    Repository paths. None without an installer's RECORD: a git checkout, a conda package.
    """
    records = sorted(tree.package.parent.glob("sglang-*.dist-info/RECORD"))
    manifest = install.read_manifest(tree)
    if len(records) != 1:
        return None
    recorded = _hashes(records[0])
    return [p for p, digest in recorded.items() if _digest(tree, manifest, p) != digest]


def _hashes(record: Path) -> dict[str, str]:
    """Repository path -> hex sha256, of the package's files."""
    out = {}
    with open(record, encoding="utf-8", newline="") as file:
        for path, hashed, _ in csv.reader(file):
            kind, _, digest = hashed.partition("=")
            if path.startswith("sglang/") and kind == "sha256":
                out[f"python/{path}"] = base64.urlsafe_b64decode(digest + "==").hex()
    return out


def _digest(tree: Tree, manifest: Manifest | None, path: str) -> str | None:
    """What a file was before apply, or is."""
    if manifest and path in manifest.files:
        return manifest.files[path].before
    try:
        with open(tree.path(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
