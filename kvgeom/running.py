"""A running process: which SGLang it runs, and since when."""

from __future__ import annotations

import os
import re
from pathlib import Path

_SITE = re.compile(r"(/\S*?/(?:site|dist)-packages)/")


def sglang_folder(pid: int) -> Path | None:
    """The folder that holds the `sglang` of a process; None where that cannot be told.

    In the order in which Python looks: its PYTHONPATH, then the site-packages of the interpreter
    that it was started with, then where its libraries were loaded from.
    """
    folder = Path(f"/proc/{pid}")
    if _other_root(folder):
        return None
    for place in [*_python_path(folder), *_interpreter(folder), *_loaded_from(folder)]:
        if (place / "sglang" / "srt").is_dir():
            return place
    return None


def served_copy(pid: int) -> Path | None:
    """The folder of the patched copy that kvgeom's plugin serves a process; it keeps it open."""
    try:
        handles = [os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return None
    found = [Path(h) for h in handles if Path(h).parent.parts[-2:] == ("kvgeom", "trees")]
    return next((place for place in found if (place / "sglang" / "srt").is_dir()), None)


def started_at(pid: int) -> float | None:
    """Seconds since the epoch, to about a second."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = re.search(r"^btime (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)
        return int(boot[1]) + int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, TypeError):
        return None


def _other_root(folder: Path) -> bool:
    """Whether its paths are not ours: another container, or a process that may not be read."""
    try:
        return os.readlink(folder / "ns/mnt") != os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True


def _environment(folder: Path) -> dict[str, str]:
    try:
        raw = (folder / "environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in raw.split("\0") if pair)


def _from_cwd(folder: Path, path: str) -> Path:
    try:
        return Path(os.readlink(folder / "cwd")) / path
    except OSError:
        return Path(path)


def _python_path(folder: Path) -> list[Path]:
    path = _environment(folder).get("PYTHONPATH", "")
    return [_from_cwd(folder, part) for part in path.split(os.pathsep) if part]


def _loaded_from(folder: Path) -> list[Path]:
    try:
        maps = (folder / "maps").read_text("utf-8", "replace")
    except OSError:
        return []
    return [Path(found) for found in dict.fromkeys(_SITE.findall(maps))]


def _interpreter(folder: Path) -> list[Path]:
    try:
        name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode("utf-8", "replace")
    except OSError:
        return []
    if "/" in name:
        found = [_from_cwd(folder, name)]
    else:
        path = _environment(folder).get("PATH", "")
        found = [Path(part) / name for part in path.split(os.pathsep) if part]
        found = [program for program in found if program.is_file()][:1]
    prefixes = [program.parent.parent for program in found]
    return [
        place
        for prefix in prefixes
        for kind in ("site-packages", "dist-packages")
        for place in sorted(prefix.glob(f"lib/python3*/{kind}"))
    ]
