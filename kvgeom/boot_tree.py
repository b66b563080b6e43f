"""A private copy of an SGLang package with the series applied. The installation is only read.

$XDG_CACHE_HOME/kvgeom/trees/
    .lock                          one maker at a time
    <release>-<made from>-<id>/    put in place by one rename; flock'ed (shared) while in use
        sglang/                    the package, patched
        digest                     of the copy as it was made
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvgeom import actions, caching, install
from kvgeom.actions import Say
from kvgeom.errors import KvgeomError
from kvgeom.install import Stage
from kvgeom.plan import Plan
from kvgeom.series import Series
from kvgeom.tree import STATE_FOLDER, Tree

_WAIT_S = 60.0
_DIGEST = "digest"


def trees_folder() -> Path:
    """$XDG_CACHE_HOME/kvgeom/trees, or ~/.cache/kvgeom/trees."""
    return caching.folder("trees")


@contextmanager
def patched(series: Series, source: Tree, say: Say) -> Iterator[Tree]:
    """The patched copy of `source`, made where it is missing or no longer right.

    It is not removed by another kvgeom before the block ends. KvgeomError where the series does not
    fit `source`, or somebody left it half-applied or changed what the series wrote.
    """
    base = trees_folder()
    try:
        with caching.writing(
            base,
            wait_s=_WAIT_S,
            on_wait=lambda: say(f"waiting for another kvgeom (up to {_WAIT_S:g} s)"),
            refusal=KvgeomError(
                f"another kvgeom has been working in {base} for {_WAIT_S:g} s",
                "wait until it has ended, then run the command again",
            ),
        ):
            folder = _right_copy(series, source, base, say)
            held = caching.hold(folder)
            for old in base.glob(f"{source.release}-*"):
                # The lower parts of one stack stay side by side.
                if old.name.rpartition("-")[0] != folder.name.rpartition("-")[0]:
                    _remove(old)
    except OSError as error:
        raise KvgeomError(
            f"{error.filename or base}: {error.strerror or error}; no copy of SGLang could be made",
            "free 250 MB there, or set XDG_CACHE_HOME to a folder that can be written",
        ) from None
    try:
        yield Tree(folder / "sglang", source.release)
    finally:
        os.close(held)


def digest(package: Path) -> str:
    """Of every file's path and bytes; what Python compiles and our lock file do not count."""
    seen = hashlib.sha256()
    for top, folders, files in os.walk(package):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        if os.path.basename(top) == STATE_FOLDER:
            files = [f for f in files if f != "lock"]
        for name in sorted(files):
            path = os.path.join(top, name)
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            seen.update(f"{os.path.relpath(path, package)}\0{content}\n".encode())
    return seen.hexdigest()


def _right_copy(series: Series, source: Tree, base: Path, say: Say) -> Path:
    """The folder of the copy, as it is or made anew."""
    say("comparing with the installation")
    actions.check_supported(series, source)
    installed = digest(source.package)
    made_from = f"{installed} {digest(Path(__file__).parent)} {series.cut_from or series.id}"
    key = hashlib.sha256(made_from.encode()).hexdigest()[:8]
    folder = base / f"{source.release}-{key}-{series.id}"
    if not _is_right(series, folder):
        made = _check_installation(series, source)
        if folder.exists() and not _remove(folder):
            raise KvgeomError(
                f"{folder} was changed, and another process is using it",
                "wait until it has ended, then run the command again",
            )
        temporary = Path(tempfile.mkdtemp(prefix=caching.TEMPORARY, dir=base))
        try:
            _make(series, source, made, installed, temporary, say)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    say("ready")
    return folder


def _is_right(series: Series, folder: Path) -> bool:
    copy = Tree(folder / "sglang", None)
    try:
        recorded = (folder / _DIGEST).read_text()
        manifest = install.read_manifest(copy)
    except (OSError, ValueError, KvgeomError):
        return False
    # No manifest: everything in the series is upstream in this release.
    applied = manifest is None or (manifest.stage, manifest.series) == (Stage.APPLIED, series.id)
    return applied and recorded == digest(copy.package)


def _check_installation(series: Series, source: Tree) -> Plan:
    """What `kvgeom apply` would do to the installation, or say against it; writes nothing."""
    made = actions.apply(series, source, dry_run=True, wait_s=0, say=lambda text: None)
    manifest = install.read_manifest(source)
    if manifest and manifest.stage is not Stage.APPLIED:
        raise KvgeomError(
            f"the series is half-applied to SGLang {source.release} in {source.package}",
            "`kvgeom apply` finishes it, `kvgeom revert` undoes it; then run the command again",
        )
    return made


def _make(
    series: Series, source: Tree, made: Plan, installed: str, temporary: Path, say: Say
) -> None:
    package = temporary / "sglang"
    say(f"copying SGLang {source.release}")
    try:
        shutil.copytree(source.package, package, ignore=_our_lock)
    except shutil.Error as error:
        raise OSError(0, error.args[0][0][2]) from None
    if digest(package) != installed:
        raise KvgeomError(f"{source.package} changed while it was copied", "run the command again")
    say("applying the series to the copy")
    copy = Tree(package, source.release)
    # What is planned for a checkout has files outside the package too.
    changes = {path: change for path, change in made.changes.items() if copy.writes(path)}
    if install.read_manifest(copy):
        actions.apply(series, copy, dry_run=False, wait_s=0, say=lambda text: None)
    elif changes:
        install.apply(copy, series.id, changes)
    (temporary / _DIGEST).write_text(digest(package))


def _our_lock(folder: str, names: list[str]) -> list[str]:
    return ["lock"] if os.path.basename(folder) == STATE_FOLDER and "lock" in names else []


def _remove(folder: Path) -> bool:
    """Remove a copy that nobody uses; renamed first, so that none is ever found in parts."""
    try:
        held = caching.hold(folder, fcntl.LOCK_EX)
    except OSError:
        return False
    try:
        rest = Path(tempfile.mkdtemp(prefix=caching.TEMPORARY, dir=folder.parent))
        folder.rename(rest / folder.name)
        with suppress(OSError):
            shutil.rmtree(rest)
    finally:
        os.close(held)
    return True
