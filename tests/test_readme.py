"""Every command of README.md is run: here, or by .ci/run itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import linked_installation

from kvgeom import series

REPO = series.find_root()
README = (REPO / "README.md").read_text("utf-8")
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.split("#")[0].strip()
]
MAKE = [c for c in COMMANDS if c.startswith("make ")]
KVGEOM = [c for c in COMMANDS if c.startswith("kvgeom ")]


def test_ci_runs_the_make_commands():
    ci = (REPO / ".ci/run").read_text("utf-8").splitlines()
    assert MAKE and set(MAKE) <= set(ci)


def test_the_only_other_command_installs_this_package():
    assert [c for c in COMMANDS if c not in MAKE + KVGEOM] == ["pip install ."]


def test_kvgeom_commands_on_an_installation(tmp_path):
    """In the order given, on a copy of SGLang that stands first on the path, as installed."""
    linked_installation(tmp_path)
    kvgeom = str(Path(sys.executable).with_name("kvgeom"))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    said = {}
    for command in KVGEOM:
        done = subprocess.run(
            [kvgeom, *command.split()[1:]], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        said[command] = done.stdout
    assert str(tmp_path) in said["kvgeom status"] and "not applied" in said["kvgeom status"]
    assert "+++ b/python/sglang/srt/mem_cache/kv_cache_configurator.py" in said["kvgeom diff"]
    assert "files changed" in said["kvgeom apply"]
    assert not (tmp_path / "sglang/srt/mem_cache/page_geometry.py").exists()


def test_the_series_table_is_the_series():
    listed = re.findall(r"^\| `([\w-]+)` \|", README, re.MULTILINE)
    assert listed == [pr.id for pr in series.load().prs]
