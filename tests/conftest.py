"""Little series and SGLang trees of our own, and the real release, for the tests of the tool."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from engine_fixtures import patched_copy, patched_engines, released_engines, running  # noqa: F401
from hypothesis import settings
from plan_answers import planned  # noqa: F401
from workers import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401

from kvgeom import edits, releases, rewrite, series, tree
from kvgeom.source import Source

REPOSITORY = Path(__file__).resolve().parent.parent
RELEASE = "0.5.23"
settings.register_profile("busy", deadline=None)  # other tests run on the other core
settings.load_profile("busy")


def toml_edit(**keys) -> str:
    """One [[edit]] table; `scope` stands for the key `in`."""
    keys = {"pr": "one", "id": "e", **keys}
    if "scope" in keys:
        keys["in"] = keys.pop("scope")
    lines = []
    for key, value in keys.items():
        if isinstance(value, list) and any(isinstance(v, dict) for v in value):
            items = (
                "{" + ", ".join(f"{k} = {json.dumps(x)}" for k, x in v.items()) + "}"
                if isinstance(v, dict)
                else json.dumps(v)
                for v in value
            )
            lines.append(f"{key} = [{', '.join(items)}]")
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return "[[edit]]\n" + "\n".join(lines) + "\n"


def parse_edits(*tables: dict) -> list[edits.Edit]:
    found, errors = edits.load("x.py", "".join(toml_edit(**t) for t in tables))
    assert errors == []
    return found


def run_edits(source: str | bytes, *tables: dict) -> tuple[list[str], bytes]:
    """The states and the bytes after carrying out edits one after the other."""
    raw = source.encode() if isinstance(source, str) else source
    found = parse_edits(*[{"id": f"e{i}", **t} for i, t in enumerate(tables)])
    at, states = Source.parse(raw), []
    for edit in found:
        outcome = rewrite.evaluate(at, edit, tuple(found))
        states.append(str(outcome.state))
        at = outcome.source
    return states, at.raw


def applied(source: str | bytes, **table) -> str:
    """One edit's result; checks that it applies, compiles, and stands when it is tried again."""
    states, raw = run_edits(source, table)
    assert states == ["to apply"]
    compile(raw, "x.py", "exec")
    assert run_edits(raw, table) == (["applied"], raw)
    assert Source.parse(raw).module.bytes == raw
    return raw.decode()


class LittleSeries:
    """A series folder: series.toml, edits, new files; locked for the trees it is reviewed on."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(exist_ok=True)

    def toml(self, text: str) -> LittleSeries:
        (self.root / "series.toml").write_text(text)
        return self

    def file(self, path: str, text: str) -> LittleSeries:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return self

    def edits(self, module: str, *tables: dict) -> LittleSeries:
        text = "\n".join(toml_edit(**t) for t in tables)
        return self.file(f"python/sglang/{module}.edits.toml", text)

    def load(self) -> series.Series:
        return series.load(self.root)

    def review(self, tree) -> series.Series:
        from kvgeom import review

        review.drift(self.load(), tree, update=True)
        return self.load()


POOLS = """\
from __future__ import annotations

import logging

from sglang.srt.layers import norm
from sglang.srt.mem_cache.rows import Rows

logger = logging.getLogger(__name__)


class Builder:
    # how wide a page is
    def page(self) -> int:
        \"\"\"Tokens in one page.\"\"\"
        # derived a second time
        return self.args.page * self.ranks  # wide

    def build(self, size):
        allocator = make_allocator(
            size,
            page=self.page(),
        )
        pool = make_pool(size, page=self.page())
        return allocator, pool
"""
ROWS = "class Rows:\n    def width(self, n):\n        return n + 4\n"


def make_tree(root: Path, release: str = RELEASE, pools: str = POOLS) -> Path:
    """A folder with an `sglang` package of ours and its dist-info."""
    package = root / "sglang"
    (package / "srt" / "mem_cache").mkdir(parents=True)
    for path, text in {
        "__init__.py": "",
        "srt/__init__.py": "",
        "srt/mem_cache/__init__.py": "",
        "srt/mem_cache/pools.py": pools,
        "srt/mem_cache/rows.py": ROWS,
    }.items():
        (package / path).write_text(text)
    (package / "srt/mem_cache/rows.py").chmod(0o755)
    info = root / f"sglang-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    return root


def make_series(root: Path) -> LittleSeries:
    """Two PRs on the tree of `make_tree`: three files changed, one of them new, in a new folder."""
    little = LittleSeries(root)
    little.toml(
        """
[[pr]]
id = "one"
title = "[mem_cache] One page"
body = "Why."
files = ["python/sglang/srt/geometry/pages.py", "test/registered/test_pages.py"]

[[pr]]
id = "two"
title = "[mem_cache] Wider rows"
"""
    )
    little.file(
        "python/sglang/srt/geometry/pages.py", "PAGE = 64\n\n\ndef check(a, b):\n    pass\n"
    )
    little.file("test/registered/test_pages.py", "assert True\n")
    little.edits(
        "srt/mem_cache/pools.py",
        {"id": "import", "op": "import", "code": "from sglang.srt.geometry import pages"},
        {"id": "page", "op": "body", "scope": "Builder.page", "code": "return pages.PAGE"},
        {
            "id": "check",
            "pr": "two",
            "op": "insert_after",
            "scope": "Builder.build",
            "at": "pool = make_pool(...)",
            "code": "pages.check(allocator, pool)",
        },
    )
    little.edits(
        "srt/mem_cache/rows.py",
        {"id": "width", "pr": "two", "op": "replace", "scope": "Rows.width", "at": "n + 4",
         "code": "n + 8"},
    )  # fmt: skip
    return little


def snapshot(root: Path, read=Path.read_bytes) -> dict[str, tuple]:
    """Every file and folder under `root`: mode and bytes, links as links."""
    out: dict[str, tuple] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            data = os.readlink(path) if path.is_symlink() else None
            if data is None and path.is_file():
                data = read(path)
            out[str(path.relative_to(root))] = (mode, data)
    return out


@pytest.fixture
def little(tmp_path):
    """(series, tree folder) of ours, reviewed and ready to apply."""
    from kvgeom import tree as trees

    root = make_tree(tmp_path / "site")
    return make_series(tmp_path / "series").review(trees.find(root)), root


@pytest.fixture(scope="session")
def released(tmp_path_factory) -> Path:
    """A copy of the installed SGLang and its dist-info, compiled files left out. Do not change."""
    from kvgeom import tree as trees

    package = trees._installed()
    root = tmp_path_factory.mktemp("released")
    ignore = shutil.ignore_patterns("__pycache__", ".kvgeom")
    shutil.copytree(package, root / "sglang", ignore=ignore, symlinks=True)
    for info in package.parent.glob("sglang-*.dist-info"):
        shutil.copytree(info, root / info.name)
    return root


def linked_copy(source: Path, target: Path) -> Path:
    """A tree of hard links, as package managers install from their caches; where the two are on
    different file systems, of copies, as package managers do then."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copy2(source, target)

    shutil.copytree(source, target, symlinks=True, copy_function=link)
    return target


@functools.cache
def import_path(release: str) -> list[Path]:
    """`releases.import_path` of a release in the user's cache, fetched where it is not there."""
    releases.fetch([release], print)
    return releases.import_path(release)


def linked_installation(root: Path) -> Path:
    """The installed SGLang and its dist-info, as hard links in `root`."""
    package = tree.find(None).package
    for source in (package, *package.parent.glob("sglang-*.dist-info")):
        linked_copy(source, root / source.name)
    return root


def kvgeom_checkout(root: Path, series_root: Path) -> list[str]:
    """A checkout of the tool with another series; the command line that runs it."""
    shutil.copytree(
        REPOSITORY / "kvgeom", root / "kvgeom", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(series_root, root, dirs_exist_ok=True)
    start = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); "
        "[sys.modules.pop(m) for m in [*sys.modules] if m.partition('.')[0] == 'kvgeom']; "  # .pth
        "from kvgeom.cli import main; main()"
    )
    return [sys.executable, "-c", start, str(root)]
