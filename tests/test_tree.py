"""Finding a tree and its release, and the sentence for each thing that is no tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_tree

from kvgeom import tree
from kvgeom.errors import KvgeomError


def refused(where: Path) -> KvgeomError:
    with pytest.raises(KvgeomError) as caught:
        tree.find(where)
    assert caught.value.way_out
    return caught.value


@pytest.mark.parametrize("inside", ["", "sglang"])
def test_a_folder_with_the_package_or_the_package(tmp_path, inside):
    found = tree.find(make_tree(tmp_path / "site") / inside)
    assert found.package == tmp_path / "site" / "sglang"
    assert str(found.release) == "0.5.23" and found.checkout is None
    assert found.path("python/sglang/srt/x.py") == found.package / "srt/x.py"
    assert found.writes("python/sglang/srt/x.py") and not found.writes("test/registered/x.py")


def test_a_linked_package_is_found_where_it_lies(tmp_path):
    make_tree(tmp_path / "site")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "sglang").symlink_to(tmp_path / "site" / "sglang")
    found = tree.find(tmp_path / "links")
    assert found.package == tmp_path / "site" / "sglang" and str(found.release) == "0.5.23"


@pytest.mark.parametrize("name", ["_version.py", "version.py"])
def test_the_release_from_a_version_file(tmp_path, name):
    make_tree(tmp_path)
    (tmp_path / "sglang-0.5.23.dist-info/METADATA").unlink()
    (tmp_path / "sglang-0.5.23.dist-info").rmdir()
    text = "raise SystemExit\n__version__: str\n__version__ = version = '0.5.22'\n"
    (tmp_path / "sglang" / name).write_text(text)
    assert str(tree.find(tmp_path).release) == "0.5.22"


def test_a_checkout_takes_its_tests_and_its_tag(tmp_path):
    def git(*command: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(
            ["git", "-C", str(tmp_path), *who, *command], check=True, capture_output=True
        )

    make_tree(tmp_path / "python")
    (tmp_path / "python/sglang-0.5.23.dist-info/METADATA").unlink()
    (tmp_path / "python/sglang-0.5.23.dist-info").rmdir()
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    assert "cannot tell the release (no dist-info" in refused(tmp_path).message
    git("tag", "v0.5.21")
    for where in (tmp_path, tmp_path / "python", tmp_path / "python/sglang"):
        found = tree.find(where)
        assert found.checkout == tmp_path and str(found.release) == "0.5.21"
    assert found.path("test/registered/x.py") == tmp_path / "test/registered/x.py"
    assert found.writes("test/registered/x.py")
    assert f"git -C {tmp_path} checkout -- a b" in found.reinstall(["a", "b"])


def test_what_is_no_tree(tmp_path):
    assert "no such folder" in refused(tmp_path / "none").message
    assert "no SGLang here" in refused(tmp_path).message
    assert refused(tmp_path).exit_code == 2
    (tmp_path / "sglang").mkdir()
    assert "no SGLang here" in refused(tmp_path).message


def test_two_releases_in_one_folder(tmp_path):
    make_tree(tmp_path)
    (tmp_path / "sglang-0.5.22.dist-info").mkdir()
    (tmp_path / "sglang-0.5.22.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.22\n")
    assert "several SGLang releases: 0.5.22, 0.5.23" in refused(tmp_path).message


def test_a_release_that_cannot_be_read(tmp_path):
    make_tree(tmp_path, release="newest")
    assert "cannot tell the release from 'newest'" in refused(tmp_path).message


def find_installed(site: Path) -> str:
    """What `find()` says in an interpreter that sees only `site` for SGLang."""
    program = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "sys.path += sys.argv[2:]; sys.path.insert(0, sys.argv[1])\n"
        "import importlib.metadata\n"
        "from kvgeom import tree\nfrom kvgeom.errors import KvgeomError\n"
        "try: print(tree.find().package)\n"
        "except KvgeomError as e: print(e)\n"
        "assert 'sglang' not in sys.modules"
    )
    import packaging

    libraries = Path(packaging.__file__).parent.parent
    only = site.parent / "libraries"
    only.mkdir(exist_ok=True)
    for name in ("packaging",):
        if not (only / name).exists():
            (only / name).symlink_to(libraries / name)
    repository = Path(tree.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program, str(site), str(repository), str(only)],
        capture_output=True, text=True, cwd=site.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_sglang_is_found_and_not_imported(tmp_path):
    make_tree(tmp_path / "site")
    (tmp_path / "site/sglang/__init__.py").write_text("raise SystemExit('imported')")
    assert find_installed(tmp_path / "site").strip() == str(tmp_path / "site/sglang")


def test_no_sglang_is_installed(tmp_path):
    (tmp_path / "site").mkdir()
    out = find_installed(tmp_path / "site")
    assert "SGLang is not installed for" in out and "--tree PATH" in out


def test_an_editable_install_is_named(tmp_path):
    site = tmp_path / "site"
    info = site / "sglang-0.5.23.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    (info / "direct_url.json").write_text(
        '{"url": "file:///src/sglang/python", "dir_info": {"editable": true}}'
    )
    assert "--tree /src/sglang/python" in find_installed(site)


def test_a_source_folder_on_the_path_is_named(tmp_path):
    make_tree(tmp_path / "site", release="0.5.22")
    (tmp_path / "site/sglang-0.5.22.dist-info/METADATA").unlink()
    (tmp_path / "site/sglang-0.5.22.dist-info").rmdir()
    assert f"--tree {tmp_path / 'site'}" in find_installed(tmp_path / "site")
