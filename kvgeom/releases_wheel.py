"""One wheel: downloaded by pip, unpacked, and compared with its own RECORD and its sha256."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from kvgeom.errors import KvgeomError

_KEPT = ".wheel"
_SUMS = "SHA256SUMS"
_POLL_S = 0.2
_UNREACHABLE = re.compile(
    r"Retrying \(|Max retries exceeded|connection error|ProxyError|Name or service not known"
    r"|name resolution|timed out",
    re.IGNORECASE,
)


def download(requirement: str, folder: Path, say: Callable[[str], None]) -> Path:
    """The wheel of `name==version` for this interpreter, from the indexes that pip is set up for.

    Everything that pip writes on the way is in `folder`, but for pip's own cache.
    """
    if importlib.util.find_spec("pip") is None:
        raise KvgeomError(
            f"pip is not installed for {sys.executable}, and it downloads {requirement}",
            f"`{sys.executable} -m ensurepip` installs it",
        )
    (folder / "tmp").mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}"]
    with (
        tempfile.TemporaryFile("w+", dir=folder, errors="replace") as said,
        subprocess.Popen(
            [*command, requirement],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder / "tmp")},
        ) as pip,
    ):
        try:
            while _runs(pip):
                say(f"downloading: {_bytes_in(folder) / 1e6:.0f} MB")
        except BaseException:
            pip.kill()
            raise
        said.seek(0)
        text = said.read()
    found = list(folder.glob("*.whl"))
    if pip.returncode or len(found) != 1:
        raise _why(requirement, text)
    return found[0]


def _runs(process: subprocess.Popen) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_in(folder: Path) -> int:
    """What has arrived: pip moves and removes files meanwhile."""
    total = 0
    for top, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(top, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _why(requirement: str, said: str) -> KvgeomError | OSError:
    """What pip's output comes to."""
    if _UNREACHABLE.search(said):
        return KvgeomError(
            f"pip could not fetch {requirement}: an index that it is set up for does not answer",
            "check the network, and `pip config list`; then run the command again: it goes on "
            "from there",
        )
    if "No matching distribution found" in said:
        python = ".".join(map(str, sys.version_info[:2]))
        where = "check the network, and where pip looks: `pip config list`"
        if "(from versions: none)" not in said:
            name = requirement.partition("=")[0]
            where = f"`{sys.executable} -m pip index versions {name}` lists the releases"
        return KvgeomError(
            f"pip finds no wheel of {requirement} for Python {python} on this machine", where
        )
    if errno := re.search(r"\[Errno (\d+)\]", said):  # a full disk
        return OSError(int(errno[1]), os.strerror(int(errno[1])))
    lines = said.strip().splitlines() or ["it said nothing"]
    why = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])
    return KvgeomError(
        f"pip could not fetch {requirement}: {why.removeprefix('ERROR: ')}",
        f"`{sys.executable} -m pip download --no-deps {requirement}` tells more",
    )


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack into an empty folder, check every file, keep the wheel beside them."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wrong = difference(folder)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        wrong = str(error)
    if wrong:
        raise KvgeomError(
            f"{wheel.name} does not hold what it says it does: {wrong}",
            "run the command again; if it says so again, the index has a damaged file, or pip's "
            f"cache (`{sys.executable} -m pip cache purge`)",
        )
    (folder / _KEPT).mkdir()
    shutil.copyfile(wheel, folder / _KEPT / wheel.name)
    sums = f"{_sha256(wheel).hex()}  {wheel.name}\n"
    (folder / _KEPT / _SUMS).write_text(sums)


def recorded(folder: Path) -> tuple[str, str]:
    """Name and sha256 of the wheel as it was fetched."""
    digest, name = (folder / _KEPT / _SUMS).read_text().split()
    return name, digest


def kept(folder: Path) -> Path | None:
    """The wheel that an unpacked package came from, None unless it is as it was fetched."""
    try:
        name, digest = recorded(folder)
        wheel = folder / _KEPT / name
        return wheel if _sha256(wheel).hex() == digest else None
    except (OSError, ValueError):
        return None


def difference(folder: Path) -> str | None:
    """How an unpacked wheel differs from its RECORD; what Python compiles does not count."""
    try:
        (record,) = folder.glob("*.dist-info/RECORD")
        with record.open(encoding="utf-8", newline="") as file:
            listed = {path: digest for path, digest, _ in csv.reader(file)}
    except (OSError, ValueError, csv.Error):
        return "its RECORD is missing or cannot be read"
    there = set(_files(folder))
    for path in sorted(listed.keys() | there):
        if path not in there:
            return f"{path} is missing"
        if path not in listed:
            return f"{path} is not of the wheel"
        own = folder / path == record
        if not own and listed[path] != _record_digest(folder / path):
            return f"{path} has other bytes than its RECORD says"
    return None


def _files(folder: Path) -> list[str]:
    out = []
    for top, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in ("__pycache__", _KEPT)]
        out += [os.path.relpath(os.path.join(top, name), folder) for name in files]
    return out


def _record_digest(path: Path) -> str:
    return "sha256=" + base64.urlsafe_b64encode(_sha256(path)).decode().rstrip("=")


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
