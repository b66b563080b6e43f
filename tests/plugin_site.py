"""A virtual environment with kvgeom's wheel in it, as `pip install` leaves it."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import REPOSITORY


class PluginSite:
    """The environment in `root`; libraries come from the environment that runs the tests.

    Without a wheel there is no kvgeom in it.
    """

    def __init__(self, root: Path, wheel: Path | None):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
        self.python = root / "venv/bin/python"
        self.packages = next((root / "venv/lib").glob("python3*")) / "site-packages"
        self.cache = root / "cache"
        if wheel is not None:
            ignore = shutil.ignore_patterns("bin")
            shutil.copytree(_installed(wheel), self.packages, ignore=ignore, dirs_exist_ok=True)
        (self.packages / "zz_libraries.pth").write_text("\n".join(site.getsitepackages()))

    def use_series(self, root: Path) -> None:
        """Another series in place of the one in the wheel."""
        inside = self.packages / "kvgeom/_series"
        shutil.rmtree(inside)
        shutil.copytree(root, inside)

    def run(self, program: str, **variables: str) -> subprocess.CompletedProcess:
        """The end of `python -c PROGRAM` in this environment."""
        return subprocess.run(
            [self.python, "-c", program],
            env=self.environment(**variables),
            cwd=self.packages.parent,
            capture_output=True,
            text=True,
        )

    def environment(self, **variables: str) -> dict[str, str]:
        dropped = ("PYTHONPATH", "KVGEOM_PLUGIN", "KVGEOM_SERVED", "SGLANG_PLUGINS")
        ours = {k: v for k, v in os.environ.items() if k not in dropped}
        return {**ours, "XDG_CACHE_HOME": str(self.cache), **variables}


@functools.cache
def build_wheel() -> Path:
    """The wheel of this repository, by its own build backend; in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="wheel-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build = ["wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    return next(folder.glob("kvgeom-*.whl"))


@functools.cache
def _installed(wheel: Path) -> Path:
    """What pip puts into the site-packages of an environment, once."""
    target = wheel.with_name("installed")
    install = ["install", "--quiet", "--no-deps", "--no-compile", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", *install, wheel], check=True)
    return target
