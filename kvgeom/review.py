"""`kvgeom lock`: compares series.lock with a tree, and writes it after a review."""

from __future__ import annotations

import os

from kvgeom import install, plan
from kvgeom.errors import KvgeomError
from kvgeom.series import Series
from kvgeom.tree import Tree


def drift(series: Series, tree: Tree, *, update: bool) -> list[str]:
    """The lines in which series.lock and the tree's release differ; `update` writes them."""
    manifest = install.read_manifest(tree)
    made = plan.make(
        series,
        lambda path: install.original(tree, manifest, path),
        tree.release,
        writes=tree.writes,
        check_lock=False,
    )
    if made.problems:
        raise KvgeomError(
            f"the series does not fit SGLang {tree.release}:\n  "
            + "\n  ".join(map(str, made.problems)),
            "mend the edits first",
        )
    known = {(e.file, e.id) for pr in series.prs for e in pr.edits}
    new = series.lock.updated(tree.release, made.digests, known)
    lines = []
    for key in sorted(series.lock.entries.keys() | new.entries.keys()):
        old_digests, new_digests = series.lock.entries.get(key, {}), new.entries.get(key, {})
        for release in sorted(old_digests.keys() | new_digests.keys()):
            before, after = old_digests.get(release, "-"), new_digests.get(release, "-")
            if before != after:
                lines.append(f"{key[0]} {key[1]} {release}: {before} -> {after}")
    if update and lines:
        path = series.root / "series.lock"
        temporary = path.with_suffix(".lock.new")
        temporary.write_text(new.dump(), "utf-8")
        os.replace(temporary, path)
    return lines
