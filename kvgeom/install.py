"""Applies a plan to a tree and takes it back, so that a kill at any moment can be recovered.

State lies in `<package>/.kvgeom/`:

    manifest.json   what is being done or done; written before the first file changes
    originals/      the bytes of every changed file, saved and synced before the manifest
    lock            one writer at a time

    no manifest -> "applying" -> files renamed into place -> "applied"
    "applied" -> "reverting" -> files renamed back -> no manifest

Files are replaced by rename, never written through: package managers hard-link their caches.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from filelock import FileLock, Timeout

from kvgeom import __version__
from kvgeom.errors import KvgeomError
from kvgeom.tree import Tree


class Stage(StrEnum):
    APPLYING = "applying"
    APPLIED = "applied"
    REVERTING = "reverting"


@dataclass(frozen=True)
class Entry:
    """One changed file: sha256 before (None: the series added it) and after, mode, mtime in ns."""

    before: str | None
    after: str
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class Manifest:
    stage: Stage
    series: str
    release: str
    kvgeom: str
    folders: tuple[str, ...]  # created by apply, outermost first, relative to the package
    files: dict[str, Entry]


class FileState(StrEnum):
    BEFORE = "as SGLang has it"
    AFTER = "patched"
    FOREIGN = "changed by somebody else"


def sha256(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def read_manifest(tree: Tree) -> Manifest | None:
    path = tree.state / "manifest.json"
    try:
        data = json.loads(path.read_bytes())
        files = {p: Entry(**e) for p, e in data.pop("files").items()}
        folders = tuple(data.pop("folders"))
        return Manifest(stage=Stage(data.pop("stage")), folders=folders, files=files, **data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as err:
        raise KvgeomError(
            f"{path} cannot be read: {err}",
            f"remove {tree.state}; then {tree.reinstall([])}",
        ) from None


def file_states(tree: Tree, manifest: Manifest) -> dict[str, FileState]:
    out = {}
    for path, entry in manifest.files.items():
        now = sha256(tree.read(path))
        known = {entry.before: FileState.BEFORE, entry.after: FileState.AFTER}
        out[path] = known.get(now, FileState.FOREIGN)
    return out


def original(tree: Tree, manifest: Manifest | None, path: str) -> bytes | None:
    """A file as SGLang has it: the saved original of a changed file, else the tree's own."""
    entry = manifest.files.get(path) if manifest else None
    if entry is None:
        return tree.read(path)
    if entry.before is None:
        return None
    saved = _saved(tree, path)
    data = saved.read_bytes() if saved.is_file() else tree.read(path)
    if sha256(data) != entry.before:
        raise KvgeomError(
            f"{saved}, the saved original of {path}, is missing or damaged",
            f"remove {tree.state}; then {tree.reinstall([path])}",
        )
    return data


@contextmanager
def locked(tree: Tree, wait_s: float, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the tree for one writer. A second calls `on_wait`, waits `wait_s`, then refuses."""
    lock = FileLock(tree.state / "lock")
    deadline, told = time.monotonic() + wait_s, False
    while not _acquire(tree, lock):
        if not told:
            on_wait()
            told = True
        if time.monotonic() > deadline:
            raise KvgeomError(
                f"another kvgeom has been working on {tree.package} for {wait_s:g} s",
                "wait until it has ended, then run the command again",
            )
        time.sleep(0.05)
    try:
        _temporary(tree.state / "manifest.json").unlink(missing_ok=True)  # of a killed run
        yield
    finally:
        if not (tree.state / "manifest.json").exists():
            # The lock file goes while it is held; filelock never takes one that lost its name.
            shutil.rmtree(tree.state / "originals", ignore_errors=True)
            (tree.state / "lock").unlink(missing_ok=True)
            with suppress(OSError):
                tree.state.rmdir()
        lock.release()


def _acquire(tree: Tree, lock: FileLock) -> bool:
    try:
        tree.state.mkdir(exist_ok=True)
        lock.acquire(timeout=0)
    except (Timeout, FileNotFoundError):  # held, or its holder just removed the folder
        return False
    except OSError as err:
        raise KvgeomError(
            f"{tree.package} cannot be written: {err.strerror}",
            "run kvgeom as the owner of that installation, or install SGLang in a venv of your own",
        ) from None
    return True


def apply(tree: Tree, series: str, changes: dict[str, tuple[bytes | None, bytes]]) -> None:
    """Write a plan's changes, or finish an apply that was interrupted. Holds: `locked`."""
    entries = {}
    for path, (before, after) in changes.items():
        if before is not None:
            _write(_saved(tree, path), before, 0o600)
        entries[path] = _entry(tree, path, before, after)
    folders = _missing_folders(tree, list(changes))
    old = read_manifest(tree)
    if old:  # an interrupted apply already made some of them
        folders = sorted({*folders, *old.folders})
    manifest = Manifest(
        Stage.APPLYING, series, str(tree.release), __version__, tuple(folders), entries
    )
    _write_manifest(tree, manifest)
    for path, (_, after) in changes.items():
        _write(tree.path(path), after, entries[path].mode)
    _write_manifest(tree, replace(manifest, stage=Stage.APPLIED))


def revert(tree: Tree, manifest: Manifest) -> None:
    """Bring back every file that `manifest` names. Holds: `locked`."""
    originals = {p: original(tree, manifest, p) for p in manifest.files}
    _write_manifest(tree, replace(manifest, stage=Stage.REVERTING))
    for path, data in originals.items():
        entry, target = manifest.files[path], tree.path(path)
        if data is None:
            _delete(target)
        elif sha256(tree.read(path)) != entry.before:
            _write(target, data, entry.mode, entry.mtime_ns)
    _remove_folders(tree, manifest)
    _forget(tree)


def forget(tree: Tree, manifest: Manifest) -> None:
    """Drop what is left of a series after SGLang was replaced: our added files and our state."""
    for path, state in file_states(tree, manifest).items():
        if manifest.files[path].before is None and state is FileState.AFTER:
            _delete(tree.path(path))
    _remove_folders(tree, manifest)
    _forget(tree)


def _forget(tree: Tree) -> None:
    (tree.state / "manifest.json").unlink()
    shutil.rmtree(tree.state / "originals", ignore_errors=True)


def _saved(tree: Tree, path: str) -> Path:
    return tree.state / "originals" / path


def _entry(tree: Tree, path: str, before: bytes | None, after: bytes) -> Entry:
    """Mode and time of the file as SGLang has it; those of an earlier apply where one began."""
    known = read_manifest(tree)
    if known and path in known.files and known.files[path].before == sha256(before):
        old = known.files[path]
        return Entry(old.before, sha256(after), old.mode, old.mtime_ns)
    if before is None:
        return Entry(None, sha256(after), 0o644, 0)
    stat = tree.path(path).stat()
    return Entry(sha256(before), sha256(after), stat.st_mode & 0o7777, stat.st_mtime_ns)


def _write_manifest(tree: Tree, manifest: Manifest) -> None:
    data = json.dumps(asdict(manifest), indent=1).encode()
    _write(tree.state / "manifest.json", data, 0o644)


def _temporary(path: Path) -> Path:
    """One name per file, so that the next run overwrites what a killed one left."""
    return path.with_name(f".{path.name}.kvgeom")


def _write(path: Path, data: bytes, mode: int, mtime_ns: int | None = None) -> None:
    """Replace a file by rename; a new inode, its folder synced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), mode)
        owner = path if path.exists() else path.parent
        with suppress(PermissionError):  # only root may, and only root needs to
            os.fchown(file.fileno(), owner.stat().st_uid, owner.stat().st_gid)
        os.fsync(file.fileno())
    if mtime_ns is not None:  # a compiled file from before the apply is valid again
        os.utime(temporary, ns=(mtime_ns, mtime_ns))
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(path: Path) -> None:
    """Remove a file that the series added, with its compiled form."""
    _temporary(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    cache = path.parent / "__pycache__"
    for compiled in cache.glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _missing_folders(tree: Tree, files: list[str]) -> list[str]:
    out = set()
    for file in files:
        folder = tree.path(file).parent
        while not folder.exists():
            out.add(os.path.relpath(folder, tree.package))
            folder = folder.parent
    return sorted(out)


def _remove_folders(tree: Tree, manifest: Manifest) -> None:
    for name in reversed(manifest.folders):
        folder = tree.package / name
        with suppress(OSError):
            shutil.rmtree(folder / "__pycache__", ignore_errors=True)
            folder.rmdir()  # stays where somebody put something into it
    for path in manifest.files:
        _temporary(tree.path(path)).unlink(missing_ok=True)
