"""An index of ours with small wheels, which pip downloads from, and `kvgeom releases` on it."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY, snapshot

from kvgeom import releases

OWN = {"sglang/__init__.py": b"", "sglang/srt/pool.py": b"rows = 4\n"}


def make_wheel(
    index: Path,
    name: str,
    version: str,
    files: dict[str, bytes],
    lie: str = "",
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """A wheel with a RECORD, which is wrong about the file `lie`."""
    info = f"{name}-{version}.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files, record = {**files, **about}, []
    for path, data in files.items():
        digest = hashlib.sha256(b"other" if path == lie else data).digest()
        text = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        record.append(f"{path},sha256={text},{len(data)}\n")
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    index.mkdir(exist_ok=True)
    wheel = index / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", compression) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """All that pip can download: a folder with some wheels. The cache is empty."""
    folder = tmp_path / "index"
    for release in ("0.5.17", "0.5.22", "0.5.23"):
        make_wheel(folder, "sglang", release, OWN)
    make_wheel(folder, "transformers", "5.12.1", {"transformers/__init__.py": b"old = True\n"})
    make_wheel(folder, "tokenizers", "0.22.2", {"tokenizers/__init__.py": b""})
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return folder


@pytest.fixture
def no_index(index, monkeypatch):
    """Call it, and pip finds nothing any more."""
    return lambda: monkeypatch.setenv("PIP_FIND_LINKS", str(index.parent / "none"))


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvgeom.cli", "releases", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, **options)
    assert "Traceback" not in done.stderr
    return done


def fetch(*names: str) -> list[str]:
    """The results."""
    return [str(f.result) for f in releases.fetch(names, lambda text: None)]


def content() -> dict[str, tuple]:
    """The cache without its lock."""
    return {k: v for k, v in snapshot(releases.cache()).items() if k != ".lock"}


def refused(done: subprocess.CompletedProcess, code: int, *words: str) -> None:
    """Two sentences on stderr after the progress, and nothing in the cache."""
    assert done.returncode == code and done.stdout == "", done
    first, second = [x for x in done.stderr.splitlines() if x.startswith("kvgeom: ")]
    assert first.startswith("kvgeom: error: ")
    for word in words:
        assert word in f"{first}\n{second}"
    assert not releases.cache().is_dir() or content() == {}
