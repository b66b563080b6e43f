"""`kvgeom releases --table`, a release that is added, and SGLang's own wheels."""

from __future__ import annotations

import json
import shutil
import subprocess

import generate
import pytest
from conftest import kvgeom_checkout, make_series, make_tree
from little_index import OWN, fetch, index, make_wheel  # noqa: F401

from kvgeom import releases, releases_table, series, tree


@pytest.fixture
def little_stack(index, tmp_path):
    """The command with a series of ours, and two releases of ours in the index; PR `two` is
    upstream in the newer one, PR `three` is only for that."""
    little = make_series(tmp_path / "series")
    text = (tmp_path / "series/series.toml").read_text()
    text = text.replace('title = "[mem_cache] W', 'red = "<0.5.23"\ntitle = "[mem_cache] W')
    text += '[[pr]]\nid = "three"\ntitle = "Three"\nfiles = ["test/three.py"]\n'
    little.toml(text + 'when = ">=0.5.23"\nabsent = "nothing to test there"\n')
    little.file("test/three.py", "assert True\n")
    rows = tmp_path / "series/python/sglang/srt/mem_cache/rows.py.edits.toml"
    rows.write_text(rows.read_text() + 'satisfied = "n + 16"\n')
    pools = tmp_path / "series/python/sglang/srt/mem_cache/pools.py.edits.toml"
    pools.write_text(pools.read_text().replace('id = "check"', 'id = "check"\nwhen = "<0.5.23"'))
    for release in ("0.5.22", "0.5.23"):
        root = make_tree(tmp_path / release, release)
        if release == "0.5.23":
            path = root / "sglang/srt/mem_cache/rows.py"
            path.write_text(path.read_text().replace("n + 4", "n + 16"))
        files = {str(p.relative_to(root)): p.read_bytes() for p in root.glob("sglang/**/*.py")}
        make_wheel(index, "sglang", release, files)
    (tmp_path / "checkout").mkdir()
    command = kvgeom_checkout(tmp_path / "checkout", little.root)

    def call(*arguments: str) -> subprocess.CompletedProcess:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done

    return call


def test_a_release_is_added_by_one_command(little_stack):
    done = little_stack("lock", "--release", "0.5.22")
    assert done.returncode == 1 and done.stdout.count(" 0.5.22: - -> ") == 3
    assert "sglang==0.5.22: unpacking" in done.stderr
    assert little_stack("lock", "--tree", str(releases.tree("0.5.22"))).stdout == done.stdout
    done = little_stack("lock", "--release", "0.5.22", "--update")
    assert done.returncode == 0 and done.stdout.endswith("series.lock: 3 lines written\n")
    done = little_stack("lock", "--release", "0.5.22")
    assert (done.returncode, done.stdout) == (0, "series.lock agrees with this tree\n")
    done = little_stack("lock", "--release", "0.5.22", "--tree", ".")
    assert done.returncode == 2 and "exclude each other" in done.stderr
    assert little_stack("lock", "--release", "9.9").returncode == 1


def test_the_table(little_stack):
    for release in ("0.5.22", "0.5.23"):
        assert little_stack("lock", "--release", release, "--update").returncode == 0
    done = little_stack("releases", "--table")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "| PR | 0.5.22 | 0.5.23 |",
        "| --- | --- | --- |",
        "| one | applied | applied |",
        "| two | applied, red | upstream |",
        "| three | absent | applied |",
        "",
        "`three` is absent from 0.5.22: nothing to test there",
    ]
    assert "table: 0.5.23: planning" in done.stderr
    found = json.loads(little_stack("releases", "--table", "--json").stdout)
    assert found["releases"] == ["0.5.22", "0.5.23"]
    assert found["prs"][2]["releases"]["0.5.22"] == {
        "state": "absent", "red": False, "absent": "nothing to test there",
    }  # fmt: skip
    (releases.tree("0.5.22") / "sglang/srt/mem_cache/rows.py").write_text("mine = 1\n")
    assert little_stack("releases", "--table").stdout == done.stdout  # SGLang's own, always


def test_the_table_of_a_release_that_does_not_fit(little_stack, index, tmp_path):
    little_stack("lock", "--release", "0.5.22", "--update")
    shutil.rmtree(releases.tree("0.5.22"))
    make_wheel(index, "sglang", "0.5.22", OWN)
    done = little_stack("releases", "--table")
    assert done.returncode == 1 and "does not fit this SGLang 0.5.22" in done.stderr


# SGLang's own wheels, from where pip is set up to download.


def test_a_real_release(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch("0.5.17") == ["fetched"] * 3
    assert str(tree.find(releases.tree("0.5.17")).release) == "0.5.17"
    assert fetch("0.5.17") == ["in place"] * 3


@pytest.fixture(scope="module")
def stack() -> series.Series:
    """The series; its releases are in the user's cache."""
    found = series.load()
    releases.fetch(found.lock.releases, lambda text: None)
    return found


def test_the_docs_show_the_table(stack):
    cells = releases_table.matrix(stack, lambda release: None)
    for pr, cell in [(pr, c) for found in cells.values() for pr, c in found.items()]:
        assert not cell.red or cell.state == "applied", f"{pr}: {cell}"
    page = (stack.root / "docs/support.md").read_text("utf-8")
    shown = generate.blocks(page)["kvgeom releases --table"]
    assert shown == releases_table.markdown(stack, cells), "make docs"
