"""Finds an SGLang tree and its release, without importing SGLang."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kvgeom.errors import KvgeomError

STATE_FOLDER = ".kvgeom"


@dataclass(frozen=True)
class Tree:
    """An `sglang` package folder. `checkout` is the git work tree it is in, else None."""

    package: Path
    release: Version
    checkout: Path | None = None

    @property
    def state(self) -> Path:
        return self.package / STATE_FOLDER

    def path(self, repo_path: str) -> Path:
        """Where a path of SGLang's repository lies: `python/sglang/x.py` -> `<package>/x.py`."""
        if repo_path.startswith("python/sglang/"):
            return self.package / repo_path.removeprefix("python/sglang/")
        if self.checkout:
            return self.checkout / repo_path
        raise ValueError(f"{repo_path} has no place in a package")

    def writes(self, repo_path: str) -> bool:
        """Tests of the series belong into a git checkout, never into a package."""
        return repo_path.startswith("python/sglang/") or self.checkout is not None

    def read(self, repo_path: str) -> bytes | None:
        """The bytes of a file, None where it is missing."""
        path = self.path(repo_path)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            raise KvgeomError(
                f"{path} cannot be read: {err.strerror}",
                "run kvgeom as a user who may read and write the tree",
            ) from None

    def reinstall(self, files: list[str]) -> str:
        """The command that brings SGLang's own files back."""
        if self.checkout:
            paths = " ".join(files)
            return f"`git -C {self.checkout} checkout -- {paths}` brings SGLang's own files back"
        command = f"pip install --force-reinstall --no-deps sglang=={self.release}"
        return f"`{command}` brings SGLang's own files back"


def find(where: Path | None = None) -> Tree:
    """The tree at `where`, or the installed SGLang of this interpreter.

    `where` may be an `sglang` folder, or a folder that holds one (site-packages, an unpacked wheel,
    the `python` folder of a checkout), or a checkout of SGLang.
    """
    package = _package_at(where) if where else _installed()
    checkout = _checkout(package)
    return Tree(package, _release(package, checkout), checkout)


def _package_at(where: Path) -> Path:
    where = where.expanduser()
    if not where.exists():
        raise KvgeomError(
            f"--tree {where}: there is no such folder",
            "give the folder that contains `sglang/`",
            exit_code=2,
        )
    for package in (where / "sglang", where / "python" / "sglang", where):
        if package.resolve().name == "sglang" and (package / "srt").is_dir():
            return package.resolve()
    raise KvgeomError(
        f"--tree {where}: no SGLang here (looked for sglang/srt)",
        "give the folder that contains `sglang/`: site-packages, an unpacked wheel, or a checkout",
        exit_code=2,
    )


def _installed() -> Path:
    spec = PathFinder.find_spec("sglang")
    if spec and spec.origin:
        package = Path(spec.origin).resolve().parent
        if _dist_infos(package):
            return package
        raise KvgeomError(
            f"SGLang is not installed as a package but imported from {package}",
            f"name it: --tree {package.parent}",
        )
    editable = _editable_source()
    if editable:
        raise KvgeomError(
            f"SGLang is installed in editable mode from {editable}", f"name it: --tree {editable}"
        )
    raise KvgeomError(
        f"SGLang is not installed for {sys.executable}",
        "run kvgeom with the interpreter that has it (pip install 'kvgeom[engine]'), "
        "or name a tree: --tree PATH",
    )


def _editable_source() -> str | None:
    """The folder of an editable install, from its direct_url.json."""
    try:
        text = importlib.metadata.distribution("sglang").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    url = json.loads(text or "{}").get("url", "")
    return url.removeprefix("file://") or None


def _checkout(package: Path) -> Path | None:
    root = package.parent.parent
    inside = package.parent.name == "python" and (root / ".git").exists()
    return root if inside else None


def _dist_infos(package: Path) -> list[Path]:
    return sorted(package.parent.glob("sglang-*.dist-info"))


def _release(package: Path, checkout: Path | None) -> Version:
    found = [importlib.metadata.Distribution.at(p).version for p in _dist_infos(package)]
    if len(set(found)) > 1:
        raise KvgeomError(
            f"{package.parent} holds the metadata of several SGLang releases: {', '.join(found)}",
            "install SGLang anew: pip uninstall sglang, then pip install sglang==VERSION",
        )
    text = found[0] if found else _version_file(package) or (checkout and _git_tag(checkout))
    try:
        return Version(text or "")
    except InvalidVersion:
        raise KvgeomError(
            f"{package}: cannot tell the release"
            + (f" from '{text}'" if text else " (no dist-info, no _version.py, no git tag)"),
            "use an installed or unpacked wheel, or check out a release tag such as v0.5.23",
        ) from None


def _version_file(package: Path) -> str | None:
    """`__version__ = "..."` of _version.py or version.py, parsed and not run."""
    for name in ("_version.py", "version.py"):
        try:
            body = ast.parse((package / name).read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            continue
        for node in body:
            names = [getattr(t, "id", "") for t in getattr(node, "targets", ())]
            value = getattr(node, "value", None)
            if "__version__" in names and isinstance(value, ast.Constant):
                return str(value.value)
    return None


def _git_tag(checkout: Path) -> str | None:
    """The release tag that HEAD has, or the last one before it: v0.5.23, v0.5.23+12.g1a2b3c."""
    command = ["git", "-C", str(checkout), "describe", "--tags", "--match", "v[0-9]*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return re.sub(r"-(\d+)-(g[0-9a-f]+)$", r"+\1.\2", done.stdout.strip())


def check_writable(tree: Tree, files: list[str]) -> None:
    """Raises KvgeomError where a folder that files go to may not be written."""
    for folder in {tree.package, *(tree.path(f).parent for f in files)}:
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise KvgeomError(
                f"{folder} cannot be written",
                "run kvgeom as the owner of that installation, or install SGLang in a venv of "
                "your own",
            )
