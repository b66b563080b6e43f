"""The plugin with the real release: SGLang's own loader, modules, plugins and server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, linked_installation
from plugin_site import PluginSite, build_wheel

pytestmark = pytest.mark.engine

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()"
HOOKED = "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("site")
    made = PluginSite(root, build_wheel())
    linked_installation(made.packages)
    return made


@pytest.fixture(scope="module")
def applied(tmp_path_factory) -> tuple[Path, list[str]]:
    """What `kvgeom apply` makes of another copy: the folder of the package, its changed files."""
    root = tmp_path_factory.mktemp("applied")
    linked_installation(root)
    command = [sys.executable, "-m", "kvgeom.cli", "apply", "--json", "--tree", root]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return root / "sglang", json.loads(done.stdout)["files"]


def test_modules_are_those_that_apply_writes(site, applied):
    package, files = applied
    names = ["page_geometry", "allocation_sizing"]
    program = (
        f"{LOAD}\n"
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    print(importlib.import_module(f'sglang.srt.mem_cache.{name}').__file__)\n"
        "print(*sys.modules['sglang'].__path__)\n"
    )
    done = site.run(program)
    assert done.returncode == 0, done.stderr
    *loaded, served = done.stdout.splitlines()[-3:]
    assert loaded == [f"{served}/srt/mem_cache/{name}.py" for name in names]
    assert served.startswith(str(site.cache)) and len(files) > 40
    for file in (f.removeprefix("python/sglang/") for f in files):
        assert Path(served, file).read_bytes() == (package / file).read_bytes(), file
        own = site.packages / "sglang" / file
        assert not own.exists() or own.read_bytes() != (package / file).read_bytes()


def test_a_foreign_hook_on_what_the_series_changes(site):
    """By a plugin that comes after ours: SGLang applies the hooks of all at the end."""
    (site.packages / "other_plugin.py").write_text(
        "from sglang.srt.plugins.hook_registry import HookRegistry as registry, HookType\n"
        f"def load(): registry.register('{HOOKED}', print, HookType.BEFORE)\n"
    )
    info = site.packages / "zz_other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-other\nVersion: 1.0\n")
    entry = "[sglang.srt.plugins]\nother = other_plugin:load\n"
    (info / "entry_points.txt").write_text(entry)
    try:
        done = site.run(LOAD)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"another plugin hooks {HOOKED}, which the series changes\n" in done.stderr
        assert site.run(LOAD, SGLANG_PLUGINS="kvgeom").returncode == 0
        assert site.run(LOAD, KVGEOM_PLUGIN="0").returncode == 0
    finally:
        (info / "entry_points.txt").unlink()
