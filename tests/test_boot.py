"""What `kvgeom boot` makes of engine reports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from boot_reports import REFUSAL, rank, report, stopped, violation

from kvgeom import boot_checks

# the table


def test_table():
    rows = {row.structure: row for row in boot_checks.table(rank(), 160)}
    assert [*rows] == ["allocator", "target pool", "draft pool", "req_to_token"]
    assert (rows["allocator"].reach, rows["allocator"].covers) == (288, None)
    target, draft = rows["target pool"], rows["draft pool"]
    assert (target.index, target.reach, target.covers) == ("translated (loc // 8)", 36, True)
    assert (draft.index, draft.reach, draft.covers) == ("raw (loc)", 288, True)
    assert (rows["req_to_token"].rows, rows["req_to_token"].reach) == (551, 160)


@pytest.mark.parametrize("rows, covers", [(288, True), (287, False), (260, False)])
def test_a_draft_pool_covers_up_to_its_last_row(rows, covers):
    found = boot_checks.table(rank(draft_rows=rows), 160)
    assert [r.covers for r in found if r.structure == "draft pool"] == [covers]
    claim = boot_checks.geometry_claim(report(geometry=[rank(n, rows) for n in range(8)]))
    assert claim.ok is covers
    if not covers:
        assert claim.text == f"draft pool has {rows} rows and is used up to 288"


def test_a_row_of_req_to_token_that_was_too_short():
    claim = boot_checks.geometry_claim(report(max_req_to_token_end=552))
    assert not claim.ok and "551" in claim.text and "552" in claim.text


def test_the_table_without_a_draft():
    rows = boot_checks.table(replace(rank(), draft=None), 160)
    assert "draft pool" not in [row.structure for row in rows]


# ranks


def test_ranks_that_agree():
    assert boot_checks.rank_differences([rank(n) for n in range(8)]) == []


@pytest.mark.parametrize("odd", [0, 5])
def test_the_rank_that_differs_is_named(odd):
    ranks = [rank(n) for n in range(8)]
    ranks[odd] = rank(odd, draft_rows=260)
    assert boot_checks.rank_differences(ranks) == [
        f"rank {odd}: draft.page_size is 4, elsewhere 32",
        f"rank {odd}: draft.rows is 260, elsewhere 288",
    ]
    claim = boot_checks.geometry_claim(report(geometry=ranks))
    assert not claim.ok and claim.text.startswith(f"rank {odd}: draft.page_size is 4")


def test_a_rank_without_a_draft_differs():
    ranks = [rank(0), rank(1), replace(rank(2), draft=None)]
    lines = boot_checks.rank_differences(ranks)
    assert "rank 2: draft.rows is None, elsewhere 288" in lines


def test_a_rank_that_said_nothing():
    claim = boot_checks.geometry_claim(report(geometry=[rank(n) for n in range(7)]))
    assert (claim.ok, claim.text) == (False, "7 of 8 ranks reported")


# tokens and logprobs


def test_equal_runs():
    found = boot_checks.compare(report(), report())
    assert (found.tokens, found.max_logprob_difference, found.differences) == (6, 0.0, [])
    assert boot_checks.serve_claim(report(), report()).ok


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"outputs": [[5, 6, 7], [8, 1, 10]]}, "request 1: token 1 is 1, 9 there"),
        ({"outputs": [[5, 6, 7], [8, 9]]}, "request 1: 2 tokens, 3 there"),
        ({"outputs": [[5, 6, 7]]}, "1 requests answered, 2 there"),
        (
            {"logprobs": [[-1.0, -2.0002, -3.0], [-0.5, -0.25, -0.125]]},
            "request 0: logprob 1 is -2.000200, -2.000000 there",
        ),
        (
            {"logprobs": [[-1.0, -2.0], [-0.5, -0.25, -0.125]]},
            "request 0: 2 and 3 logprobs of 3 tokens",
        ),
    ],
)
def test_a_difference_is_named(changes, line):
    mine = report(**changes)
    assert boot_checks.compare(mine, report()).differences == [line]
    claim = boot_checks.serve_claim(mine, report())
    assert (claim.ok, claim.text) == (False, f"not as the tp 1 control: {line}")


def test_logprobs_within_the_tolerance():
    near = report(logprobs=[[-1.0, -2.00009, -3.0], [-0.5, -0.25, -0.125]])
    found = boot_checks.compare(near, report())
    assert found.differences == [] and found.max_logprob_difference == pytest.approx(9e-5)


def test_a_logprob_that_is_no_number():
    broken = report(logprobs=[[-1.0, math.nan, -3.0], [-0.5, -0.25, -0.125]])
    found = boot_checks.compare(broken, report())
    assert len(found.differences) == 1 and math.isnan(found.max_logprob_difference)


@pytest.mark.parametrize("usage, ok", [(0.97, True), (0.969, False)])
def test_the_cache_has_to_be_full(usage, ok):
    assert boot_checks.serve_claim(report(peak_token_usage=usage), report()).ok is ok


def test_runs_that_answered_nothing_do_not_agree():
    empty = report(outputs=[], logprobs=[])
    assert boot_checks.serve_claim(empty, empty).text == "no tokens came back"


def test_a_control_that_failed():
    bad = stopped("serve", "RuntimeError", "no\nmore")
    claim = boot_checks.serve_claim(report(), bad)
    assert not claim.ok
    assert claim.text == ("control: the engine stopped while serving on rank 3: RuntimeError: no")


# the faults


def test_the_refusal():
    right = stopped("boot", "PageGeometryError", REFUSAL)
    claim = boot_checks.refuse_claim(right)
    assert claim.ok and REFUSAL in claim.text
    assert boot_checks.mismatch(right) == {
        "pool": 4, "allocator": 32, "reaches": 288, "valid_to": 260,
    }  # fmt: skip


@pytest.mark.parametrize(
    "run",
    [
        report(),
        stopped("serve", "PageGeometryError", REFUSAL),
        stopped("boot", "RuntimeError", REFUSAL),
        stopped("boot", "PageGeometryError", REFUSAL.replace("DRAFT", "TARGET")),
        stopped("boot", "PageGeometryError", REFUSAL.replace("pool=4", "pool=8")),
        stopped("boot", "PageGeometryError", REFUSAL.replace("valid_to=260", "valid_to=288")),
        stopped("boot", "PageGeometryError", "other"),
    ],
)
def test_what_is_no_refusal(run):
    assert not boot_checks.refuse_claim(run).ok


def test_the_overrun():
    run = stopped("serve", "OutOfBoundsWrite", "x", violations=[violation(), violation(rank=2)])
    claim = boot_checks.overrun_claim(run)
    assert claim.ok and "row 260 of 260" in claim.text and "page (8 of 8)" in claim.text


@pytest.mark.parametrize(
    "violations",
    [
        [],
        [violation(structure="target")],
        [violation(), violation(structure="req_to_token")],
        [violation(index=259)],
        [violation(allocator_page=4)],
    ],
)
def test_what_is_no_overrun(violations):
    assert not boot_checks.overrun_claim(report(violations=violations)).ok
