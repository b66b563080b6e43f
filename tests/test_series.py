"""Loading a series: every error at once, each naming the file and the thing."""

from __future__ import annotations

import pytest
from conftest import LittleSeries, make_series, make_tree
from packaging.version import Version

from kvgeom import edits, lock, review, series, tree
from kvgeom.errors import KvgeomError

EDIT = {"op": "body", "scope": "f", "code": "return 1"}


def load_errors(**changes) -> str:
    """What one [[edit]] table says when keys are changed (None takes one away)."""
    from conftest import toml_edit

    table = {k: v for k, v in {**EDIT, **changes}.items() if v is not None}
    found, errors = edits.load("python/x.py", toml_edit(**table))
    assert not found or not errors
    return "\n".join(errors)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"scop": "f"}, "unknown key 'scop'"),
        ({"op": "remove"}, "unknown op 'remove'"),
        ({"op": 3}, "'op' must be text"),
        ({"code": None}, "'code' is missing"),
        ({"code": "return ("}, "'code' is not Python"),
        ({"code": "return 1\n# end"}, "ends with a comment"),
        ({"scope": None}, "op 'body' needs 'in'"),
        ({"scope": 3}, "'in' must be text"),
        ({"at": "f()"}, "'at' means nothing for op 'body'"),
        ({"op": "insert_after"}, "needs 'at'"),
        ({"op": "insert_after", "at": "f("}, "shape is not Python"),
        ({"op": "insert_after", "at": "a; b"}, "one statement or expression"),
        ({"op": "insert_after", "at": "..."}, "matches everything"),
        ({"op": "insert_after", "at": []}, "'at' is empty"),
        ({"op": "insert_after", "at": [{"match": "f()", "cod": "g()"}]}, "unknown key 'cod'"),
        ({"op": "insert_after", "at": [{"code": "g()"}]}, "each of 'at' is a shape"),
        ({"op": "insert_after", "at": "f()", "count": 0}, "at least 1, not 0"),
        ({"op": "insert_after", "at": "f()", "count": "2"}, "whole number"),
        ({"op": "kwarg", "at": "f()", "code": "1"}, "needs 'name'"),
        ({"op": "kwarg", "at": "f()", "name": "k", "code": "x = 1"}, "'code' is not Python"),
        ({"op": "define", "code": "x = 1"}, "one function or class"),
        ({"op": "define", "code": "def f(): pass", "before": "a", "after": "b"}, "exclude"),
        ({"op": "import", "scope": None, "code": "x = 1"}, "is import statements"),
        ({"op": "import", "scope": None, "code": "from . import x"}, "absolute modules"),
        ({"op": "import", "scope": None, "code": "from a import *"}, "no '*'"),
        ({"when": "about 0.5"}, "not a release range"),
        ({"satisfied": "f("}, "shape is not Python"),
        ({"pr": ""}, "'pr' must be text"),
    ],
)
def test_an_error_in_an_edit(changes, sentence):
    found = load_errors(**changes)
    assert sentence in found and found.startswith("python/x.py.edits.toml: edit 'e'")


def test_a_sound_edit_has_no_error():
    assert load_errors() == ""


@pytest.mark.parametrize("text", ["[[edit]", "[edit]\nid = 'x'", "edit = 3", "other = 1"])
def test_a_broken_edit_file(text):
    found, errors = edits.load("x.py", text)
    assert not found and errors and errors[0].startswith("x.py.edits.toml: ")


def errors_of(little: LittleSeries) -> str:
    with pytest.raises(KvgeomError) as caught:
        little.load()
    return caught.value.message


def test_every_error_of_a_series_at_once(tmp_path):
    little = make_series(tmp_path)
    little.file("python/sglang/srt/stray.py", "")
    little.file("test/registered/stray.py", "")
    little.edits("srt/a.py", {"id": "x", "pr": "three", **EDIT}, {"id": "x", **EDIT},
                 {"id": "x", **EDIT}, {"id": "y", **EDIT, "codes": ""})  # fmt: skip
    (tmp_path / "test/registered/test_pages.py").unlink()
    message = errors_of(little)
    for sentence in (
        "python/sglang/srt/stray.py: no PR",
        "test/registered/stray.py: no PR",
        "edit 'x' names the PR 'three'",
        "edit 'x': its id is there twice",
        "edit 'y': unknown key 'codes'",
        "lists test/registered/test_pages.py, which is missing",
    ):
        assert sentence in message, message


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "lists no PR"),
        ("[[pr]]\nid = 'a'", "'title' must be text"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nfile = []", "unknown key 'file'"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\n[[pr]]\nid = 'a'\ntitle = 'c'", "id is there twice"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nfiles = ['/etc/x']", "not a path under python/ or test/"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nfiles = ['python/../x']", "not a path under"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nwhen = 'new'", "'when' is not a release range: 'new'"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nwhen = 3", "'when' is not a release range: 3"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nred = 'all'", "'red' is not a release range: 'all'"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nwhen = '<1'", "'when' and 'absent' go together"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nabsent = 'no'", "'when' and 'absent' go together"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nwhen = '<1'\nabsent = ' '", "go together"),
        ("[[pr]]\nid = 'a'\ntitle = 'b'\nwhen = '<1'\nabsent = 3", "go together"),
        ("upstream = 'vllm'\n[[pr]]\nid = 'a'\ntitle = 'b'", "upstream is 'vllm'"),
        ("[[pr]", "series.toml cannot be read"),
    ],
)
def test_an_error_in_series_toml(text, sentence, tmp_path):
    assert sentence in errors_of(LittleSeries(tmp_path).toml(text))


def test_a_file_of_two_prs_is_an_error(tmp_path):
    little = make_series(tmp_path)
    text = (tmp_path / "series.toml").read_text()
    little.toml(text + 'files = ["python/sglang/srt/geometry/pages.py"]\n')
    assert "pages.py is listed twice" in errors_of(little)


def test_a_group_needs_a_member_in_every_supported_release(tmp_path):
    little = make_series(tmp_path)
    lines = [lock.Lock({("f", "e"): {"0.5.22": "x", "0.5.23": "x"}}).dump()]
    little.file("series.lock", "".join(lines))
    little.edits(
        "srt/a.py",
        {"id": "old", "group": "page", "when": "<0.5.22", **EDIT},
        {"id": "new", "group": "page", "when": ">0.5.22", **EDIT},
    )
    message = errors_of(little)
    assert "group 'page' has no edit for 0.5.22" in message and "0.5.23" not in message


def test_a_pr_without_edits_in_a_supported_release_says_why(tmp_path):
    little = LittleSeries(tmp_path).toml("[[pr]]\nid = 'one'\ntitle = 't'\n")
    little.edits("srt/a.py", {"id": "e", "when": ">=0.5.23", **EDIT})
    little.file("series.lock", lock.Lock({("f", "e"): {"0.5.22": "x", "0.5.23": "x"}}).dump())
    message = errors_of(little)
    assert "PR 'one' has no edit for 0.5.22" in message and "0.5.23" not in message
    text = "when = '>=0.5.23'\nabsent = 'nothing to mend there'\n"
    little.toml((tmp_path / "series.toml").read_text() + text)
    (pr,) = little.load().prs
    assert pr.absent == "nothing to mend there" and not pr.live(Version("0.5.22"))


def test_a_series_outside_a_checkout_and_a_wheel(monkeypatch, tmp_path):
    (tmp_path / "kvgeom").mkdir()
    monkeypatch.setattr(series, "__file__", str(tmp_path / "kvgeom" / "series.py"))
    with pytest.raises(KvgeomError, match="no series.toml"):
        series.find_root()
    (tmp_path / "kvgeom" / "_series").mkdir()
    (tmp_path / "kvgeom" / "_series" / "series.toml").write_text("")
    assert series.find_root() == tmp_path / "kvgeom" / "_series"


def test_the_series_id_follows_what_is_written(tmp_path):
    ids = [make_series(tmp_path).load().id]
    ids.append(make_series(tmp_path).load().id)
    make_series(tmp_path).file("python/sglang/srt/geometry/pages.py", "PAGE = 65\n")
    ids.append(LittleSeries(tmp_path).load().id)
    assert ids[0] == ids[1] != ids[2]


def test_the_lock_reads_back_sorted_one_line_each():
    entries = {("b.py", "e"): {"0.5.9": "1", "0.5.10": "2"}, ("a.py", "e.x"): {"0.5.9": "upstream"}}
    text = lock.Lock(entries).dump()
    assert lock.parse(text).entries == entries
    assert text.index("a.py") < text.index("b.py")
    assert text.index('"0.5.9" = "1"\n') < text.index('"0.5.10" = "2"\n')
    assert lock.parse(text).releases == [Version("0.5.9"), Version("0.5.10")]


@pytest.mark.parametrize("text", ["x", "a = 1", '["a.py".e]\n"newest" = "1"'])
def test_a_broken_lock(text, tmp_path):
    make_series(tmp_path).file("series.lock", text)
    with pytest.raises(KvgeomError, match="series.lock cannot be read"):
        LittleSeries(tmp_path).load()


def test_the_review_prints_drift_and_writes_only_when_told(tmp_path):
    little = make_series(tmp_path / "series")
    at = tree.find(make_tree(tmp_path / "site"))
    printed = review.drift(little.load(), at, update=False)
    assert len(printed) == 3 and not (tmp_path / "series/series.lock").exists()
    assert review.drift(little.load(), at, update=True) == printed
    assert review.drift(little.load(), at, update=False) == []
    before = (tmp_path / "series/series.lock").read_text()
    next_one = tree.find(make_tree(tmp_path / "next", release="0.5.24"))
    review.drift(little.load(), next_one, update=True)
    after = (tmp_path / "series/series.lock").read_text()
    assert len(after.splitlines()) == len(before.splitlines()) + 3
    added = [line for line in after.splitlines() if line not in before.splitlines()]
    assert added and all(line.startswith('"0.5.24" = ') for line in added)
    assert [str(r) for r in little.load().lock.releases] == ["0.5.23", "0.5.24"]


def test_the_review_of_a_tree_that_does_not_fit_writes_nothing(tmp_path):
    little = make_series(tmp_path / "series")
    at = tree.find(make_tree(tmp_path / "site", pools="x = 1\n"))
    with pytest.raises(KvgeomError, match="scope 'Builder.page' found 0 times"):
        review.drift(little.load(), at, update=True)
    assert not (tmp_path / "series/series.lock").exists()
