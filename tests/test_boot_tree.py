"""The private copy that `kvgeom boot` works on: patched, reused while right, never the user's."""

from __future__ import annotations

import shutil

import pytest
from conftest import make_series, snapshot

from kvgeom import actions, boot_tree
from kvgeom import tree as trees
from kvgeom.errors import KvgeomError
from kvgeom.install import Stage

PATCHED = "srt/geometry/pages.py"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvgeom" / "trees"


def make(little, on_say=lambda text: None):
    """(folder of the copy, what was said)."""
    series, root = little
    said = []

    def say(text):
        said.append(text)
        on_say(text)

    with boot_tree.patched(series, trees.find(root), say) as copy:
        assert (copy.package / PATCHED).is_file()
        assert "return pages.PAGE" in (copy.package / "srt/mem_cache/pools.py").read_text()
        return copy.package.parent, said


def copies(cache):
    return sorted(p.name for p in cache.iterdir() if p.name != ".lock")


def test_the_installation_is_only_read(little, cache):
    before = snapshot(little[1])
    folder, said = make(little)
    assert snapshot(little[1]) == before
    assert "copying SGLang 0.5.23" in said
    assert copies(cache) == [folder.name]
    assert folder.name.startswith("0.5.23-") and folder.name.endswith(f"-{little[0].id}")


def test_a_copy_that_is_right_is_used_again(little):
    folder, _ = make(little)
    (folder / "sglang/__pycache__").mkdir()
    (folder / "sglang/__pycache__/x.pyc").write_bytes(b"compiled")
    inode = folder.stat().st_ino
    again, said = make(little)
    assert (again, again.stat().st_ino) == (folder, inode)
    assert said == ["comparing with the installation", "ready"]


@pytest.mark.parametrize("path", ["srt/mem_cache/rows.py", "__init__.py", PATCHED, ".kvgeom"])
def test_a_copy_that_was_changed_is_made_anew(little, path):
    folder, _ = make(little)
    changed = folder / "sglang" / path
    if changed.is_dir():
        shutil.rmtree(changed)
    else:
        changed.write_text("changed = True\n")
    _, said = make(little)
    assert "copying SGLang 0.5.23" in said
    assert not changed.is_file() or changed.read_text() != "changed = True\n"


def test_another_installation_gets_another_copy(little, cache):
    first, _ = make(little)
    (little[1] / "sglang/srt/more.py").write_text("more = 1\n")
    second, _ = make(little)
    assert (second / "sglang/srt/more.py").is_file()
    assert copies(cache) == [second.name] != [first.name]


def test_a_copy_in_use_stays(little, cache):
    series, root = little
    with boot_tree.patched(series, trees.find(root), lambda text: None) as copy:
        (root / "sglang/srt/more.py").write_text("more = 1\n")
        second, _ = make(little)
        assert copies(cache) == sorted([copy.package.parent.name, second.name])
        (copy.package / "__init__.py").write_text("changed = 1\n")
        (root / "sglang/srt/more.py").unlink()
        with pytest.raises(KvgeomError, match="was changed, and another process is using it"):
            make(little)
    assert make(little)[0] == copy.package.parent


def test_a_copy_of_another_release_stays(little, cache):
    other = cache / "0.5.22-0123456789abcdef-01234567"
    other.mkdir(parents=True)
    folder, _ = make(little)
    assert copies(cache) == sorted([other.name, folder.name])


def test_the_lower_parts_of_a_stack_stay_side_by_side(little, cache):
    series, root = little
    folder, _ = make(little)
    with boot_tree.patched(series.upto(""), trees.find(root), lambda text: None) as released:
        assert not (released.package / PATCHED).exists()
        assert snapshot(released.package / "srt") == snapshot(root / "sglang/srt")
    assert copies(cache) == sorted([folder.name, released.package.parent.name])
    (root / "sglang/srt/more.py").write_text("more = 1\n")
    assert copies(cache) != [make(little)[0].name] == copies(cache)


def test_the_release_out_of_an_installation_that_has_the_series(little, tmp_path):
    series, root = little
    plain = snapshot(root / "sglang")
    apply(series, root)
    with boot_tree.patched(series.upto(""), trees.find(root), lambda text: None) as released:
        shutil.rmtree(released.package / ".kvgeom", ignore_errors=True)
        assert snapshot(released.package) == plain


def test_what_a_killed_maker_left_goes(little, cache):
    (cache / ".new-left/sglang").mkdir(parents=True)
    folder, _ = make(little)
    assert copies(cache) == [folder.name]


def test_an_installation_that_has_the_series(little):
    series, root = little
    apply(series, root)
    before = snapshot(root)
    folder, _ = make(little)
    assert snapshot(root) == before
    assert snapshot(folder / "sglang/srt") == snapshot(root / "sglang/srt")


def test_an_installation_that_has_another_version_of_the_series(little, tmp_path):
    series, root = little
    apply(series, root)
    newer = make_series(tmp_path / "newer")
    newer.file(f"python/sglang/{PATCHED}", "PAGE = 128\n\n\ndef check(a, b):\n    pass\n")
    plain = tmp_path / "plain"
    shutil.copytree(root, plain)
    actions.revert(series, trees.find(plain), wait_s=0, say=lambda text: None)
    folder, _ = make((newer.review(trees.find(plain)), root))
    assert "PAGE = 128" in (folder / "sglang" / PATCHED).read_text()
    assert "PAGE = 64" in (root / "sglang" / PATCHED).read_text()


def test_a_half_applied_installation_is_refused(little, cache):
    series, root = little
    apply(series, root)
    manifest = root / "sglang/.kvgeom/manifest.json"
    text = manifest.read_text().replace(f'"{Stage.APPLIED}"', f'"{Stage.APPLYING}"')
    manifest.write_text(text)
    with pytest.raises(KvgeomError, match="half-applied"):
        make(little)
    assert copies(cache) == []


def test_an_installation_that_somebody_changed_is_refused(little, cache):
    series, root = little
    apply(series, root)
    (root / "sglang/srt/mem_cache/rows.py").write_text("mine = 1\n")
    with pytest.raises(KvgeomError, match="changed by somebody else.*rows.py"):
        make(little)
    assert copies(cache) == []


def test_an_installation_that_changes_meanwhile(little, cache):
    def change(text):
        if text.startswith("copying"):
            (little[1] / "sglang/__init__.py").write_text("changed = 1\n")

    with pytest.raises(KvgeomError, match="changed while it was copied"):
        make(little, change)
    assert copies(cache) == []


def test_an_interrupt_leaves_nothing(little, cache):
    def interrupt(text):
        if text.startswith("applying"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(little, interrupt)
    assert copies(cache) == []


def test_a_cache_that_cannot_be_written(little, cache):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file in the way")
    with pytest.raises(KvgeomError, match="no copy of SGLang could be made"):
        make(little)


def apply(series, root):
    actions.apply(series, trees.find(root), dry_run=False, wait_s=0, say=lambda text: None)
