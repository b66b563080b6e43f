"""Plans: states, problems, composition of PRs, and what series.lock notices."""

from __future__ import annotations

import pytest
from conftest import POOLS, ROWS, LittleSeries, make_series, make_tree
from packaging.version import Version

from kvgeom import plan, tree
from kvgeom.plan import PrState

FILE = "python/sglang/srt/mem_cache/pools.py"
ROWS_FILE = "python/sglang/srt/mem_cache/rows.py"
PAGES = "python/sglang/srt/geometry/pages.py"
RELEASE = Version("0.5.23")


def make(little, files: dict[str, str], release=RELEASE, **options) -> plan.Plan:
    return plan.make(
        little,
        lambda path: files[path].encode() if path in files else None,
        release,
        writes=lambda path: path.startswith("python/"),
        **options,
    )


@pytest.fixture
def reviewed(tmp_path):
    little = make_series(tmp_path / "series")
    return little.review(tree.find(make_tree(tmp_path / "site")))


TREE = {FILE: POOLS, ROWS_FILE: ROWS}


def problems(made: plan.Plan) -> str:
    return "\n".join(map(str, made.problems))


def test_a_plan_of_a_pristine_tree(reviewed):
    made = make(reviewed, TREE)
    assert made.problems == ()
    assert [p.state for p in made.prs] == [PrState.NOT_APPLIED] * 2
    assert list(made.changes) == [FILE, PAGES, ROWS_FILE]
    assert made.changes[PAGES][0] is None
    one, two = made.prs
    assert one.changes[FILE][0] == POOLS.encode()
    assert two.changes[FILE][0] == one.changes[FILE][1]  # each PR starts where the last one ends
    assert made.changes[FILE] == (POOLS.encode(), two.changes[FILE][1])
    assert b"pages.check(allocator, pool)" not in one.changes[FILE][1]


def test_a_plan_of_the_result_changes_nothing(reviewed):
    after = {p: a.decode() for p, (_, a) in make(reviewed, TREE).changes.items()}
    made = make(reviewed, after)
    assert made.problems == () and made.changes == {}
    assert [p.state for p in made.prs] == [PrState.APPLIED] * 2


def test_every_problem_is_told_with_file_edit_and_line(reviewed):
    drifted = POOLS.replace("make_pool(size", "make_kv_pool(size").replace("page(self)", "pg(self)")
    made = make(reviewed, {FILE: drifted, ROWS_FILE: ROWS + "x = (\n"})
    text = problems(made)
    assert f"{FILE}: edit 'page': scope 'Builder.page' found 0 times" in text
    assert f"{FILE}: edit 'check': anchor found 0 times in 'build', wanted 1" in text
    assert "near: line 23: pool = make_kv_pool(size, page=self.page())" in text
    assert f"{ROWS_FILE}: not Python" in text
    assert len(made.problems) == 3


def test_a_missing_file_is_told_once(reviewed):
    made = make(reviewed, {FILE: POOLS})
    assert problems(made) == f"{ROWS_FILE}: SGLang has no such file here"


def test_another_file_of_a_new_name_is_a_problem(reviewed):
    made = make(reviewed, {**TREE, PAGES: "PAGE = 1\n"})
    assert problems(made) == f"{PAGES}: SGLang has another file of this name"


def test_code_that_changed_since_the_review_is_a_problem(reviewed):
    wider = POOLS.replace("* self.ranks", "* self.ranks * self.depth")
    made = make(reviewed, {**TREE, FILE: wider})
    text = problems(made)
    assert "edit 'page': the code around its anchor is not the code that was reviewed" in text
    assert "(line 13)" in text and len(made.problems) == 1


def test_comments_and_layout_may_change(reviewed):
    other = POOLS.replace("# derived a second time", "# other words").replace(
        "self.args.page * self.ranks", "(self.args.page\n            * self.ranks)"
    )
    assert make(reviewed, {**TREE, FILE: other}).problems == ()


def test_code_elsewhere_in_the_file_may_change(reviewed):
    other = POOLS.replace("logger =", "VERSION = 3\nlogger =") + "\n    def more(self): pass\n"
    assert make(reviewed, {**TREE, FILE: other}).problems == ()


def test_an_edit_without_a_review_is_a_problem(reviewed):
    text = problems(make(reviewed, TREE, Version("0.5.24")))
    assert text.count("series.lock has no review of it for 0.5.24") == 3


def test_the_review_does_not_depend_on_the_other_prs(tmp_path):
    """The check of PR `two` is in the function that an edit of PR `one` changes."""
    little = make_series(tmp_path / "series")
    extra = {"id": "size", "op": "replace", "scope": "Builder.build", "at": "self.page()",
             "code": "self.page", "count": 2}  # fmt: skip
    text = (tmp_path / "series" / f"{FILE}.edits.toml").read_text()
    with_both = make(little.load(), TREE, check_lock=False).digests
    from conftest import toml_edit

    little.file(f"{FILE}.edits.toml", toml_edit(**extra) + text)
    with_more = make(little.load(), TREE, check_lock=False).digests
    assert {k: v for k, v in with_more.items() if k[1] != "size"} == with_both
    assert with_more[FILE, "size"] == with_both[FILE, "check"]


def test_a_definition_is_reviewed_by_its_neighbour_alone(tmp_path):
    little = LittleSeries(tmp_path).toml("[[pr]]\nid = 'one'\ntitle = 't'\n")
    table = {"op": "define", "scope": "Builder", "after": "page", "code": "def n(self): pass"}
    stack = little.edits("srt/mem_cache/pools.py", table).load()
    old = make(stack, TREE, check_lock=False).digests
    body = make(stack, {FILE: POOLS.replace("self.ranks", "2")}, check_lock=False).digests
    there = make(
        stack,
        {FILE: POOLS + "\n    def n(self):\n        return self.page()\n"},
        check_lock=False,
    ).digests
    assert old == body and old != there


def test_upstream_has_it(tmp_path):
    little = make_series(tmp_path)
    little.edits(
        "srt/mem_cache/rows.py",
        {"id": "width", "pr": "two", "op": "replace", "scope": "Rows.width", "at": "n + 4",
         "code": "n + 8", "satisfied": "n + 16"},
    )  # fmt: skip
    little.edits(
        "srt/mem_cache/pools.py",
        {"id": "import", "op": "import", "pr": "two", "code": "import os"},
        {"id": "page", "pr": "two", "op": "body", "scope": "Builder.page", "code": "return 1",
         "satisfied": "pages.PAGE"},
    )  # fmt: skip
    files = {
        FILE: POOLS.replace("self.args.page *", "pages.PAGE *"),
        ROWS_FILE: ROWS.replace("4", "16"),
    }
    made = make(little.load(), files, check_lock=False)
    assert [p.state for p in made.prs] == [PrState.NOT_APPLIED, PrState.UPSTREAM]
    # The import goes with the edits that use it: nothing uses it, nothing is imported.
    assert list(made.changes) == [PAGES]
    assert made.digests == {(FILE, "page"): "upstream", (ROWS_FILE, "width"): "upstream"}


def test_not_for_this_release(tmp_path):
    little = make_series(tmp_path)
    text = 'when = "<0.5.20"\nabsent = "not needed there"\n'
    little.toml((tmp_path / "series.toml").read_text() + text)
    made = make(little.load(), TREE, check_lock=False)
    assert [p.state for p in made.prs] == [PrState.NOT_APPLIED, PrState.ABSENT]
    assert ROWS_FILE not in made.changes
    assert {str(r.state) for r in made.prs[1].edits} == {"not for this release"}


def test_tests_alone_do_not_apply_to_a_package(tmp_path):
    little = LittleSeries(tmp_path).toml("[[pr]]\nid='a'\ntitle='t'\nfiles=['test/a.py']\n")
    made = make(little.file("test/a.py", "").load(), TREE)
    assert made.problems == () and [p.state for p in made.prs] == [PrState.NOT_APPLICABLE]


def test_alternatives_by_release(tmp_path):
    little = LittleSeries(tmp_path).toml("[[pr]]\nid = 'one'\ntitle = 't'\n")
    table = {"op": "replace", "scope": "Rows.width", "at": "n + 4", "group": "w"}
    stack = little.edits(
        "srt/mem_cache/rows.py",
        {**table, "id": "old", "code": "n + 5", "when": "<0.5.20"},
        {**table, "id": "new", "code": "n + 6", "when": ">=0.5.20,<0.5.24"},
    ).load()
    for release, want in (("0.5.19", b"n + 5"), ("0.5.23", b"n + 6")):
        made = make(stack, TREE, Version(release), check_lock=False)
        assert made.problems == () and want in made.changes[ROWS_FILE][1]
    made = make(stack, TREE, Version("0.5.24"), check_lock=False)
    assert problems(made) == "PR 'one': group 'w' has no edit for 0.5.24"


def test_a_pr_that_is_partly_there_is_a_problem(reviewed):
    files = {**TREE, ROWS_FILE: ROWS.replace("n + 4", "n + 8")}
    made = make(reviewed, files)
    assert "PR 'two' is partly in place already, and not by kvgeom (edits width)" in problems(made)


def test_a_result_that_does_not_compile_is_a_problem(tmp_path):
    little = LittleSeries(tmp_path).toml("[[pr]]\nid = 'one'\ntitle = 't'\n")
    table = {"op": "insert_after", "at": "class Rows: ...", "code": "return 1"}
    made = make(little.edits("srt/mem_cache/rows.py", table).load(), TREE, check_lock=False)
    assert "the edited file does not compile: 'return' outside function" in problems(made)


def test_prs_may_build_on_each_other(tmp_path):
    little = make_series(tmp_path / "series")
    little.edits(
        "srt/mem_cache/rows.py",
        {"id": "width", "op": "replace", "scope": "Rows.width", "at": "n + 4", "code": "grow(n)"},
        {"id": "grow", "op": "define", "before": "Rows", "code": "def grow(n):\n    return n + 8"},
        {"id": "more", "pr": "two", "op": "replace", "scope": "grow", "at": "n + 8",
         "code": "n + 9"},
    )  # fmt: skip
    stack = little.review(tree.find(make_tree(tmp_path / "site")))
    made = make(stack, TREE)
    assert made.problems == ()
    assert b"return n + 9" in made.changes[ROWS_FILE][1]
    assert (ROWS_FILE, "more") not in made.digests  # our own code needs no review
