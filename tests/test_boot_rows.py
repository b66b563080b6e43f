"""`kvgeom boot --step rows`: which runs it makes, and what it makes of their reports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from kvgeom import boot_rows, series
from kvgeom.boot_specs import Pair, Step, choose
from kvgeom.cpu_engine import EngineError, EngineReport, Violation

OVER_ROW = Violation(
    rank=0, structure="req_to_token", cls="ReqToTokenPool", index=4, limit=44, row=3, start=28,
    end=68, message="rank 0: req_to_token row 3 columns [28, 68) of 44",
)  # fmt: skip
OVER_BUFFER = Violation(
    rank=0, structure="kernel", cls="generate", index=1920, limit=1920, message="rank 0: kernel"
)


def reports() -> dict[str, EngineReport]:
    """Every run of the step as it should go."""
    found = {}
    for name, spec in boot_rows.specs(8, 8, "cpu").items():
        report = EngineReport(
            spec=spec.resolved(), outputs=[[5, 6], [7, 8]], logprobs=[[-1.0, -2.0]] * 2,
            idle_ranks=[*range(spec.tp)],
        )  # fmt: skip
        if name in boot_rows.STACK:
            over = OVER_ROW if name == "rows-released" else OVER_BUFFER
            error = EngineError("serve", "OutOfBoundsWrite", over.message, rank=0)
            report = replace(report, outputs=[], violations=[over], error=error)
        found[name] = report
    return found


def claim_of(found: dict[str, EngineReport]):
    return boot_rows.rows_claim(*(found[name] for name in boot_rows.RUNS))


def test_a_step_that_holds():
    claim = claim_of(reports())
    assert claim.ok, claim.text
    assert "4 tokens in each of 4 runs" in claim.text
    assert "writes column 67 of 44" in claim.text and "element 1920 of 1920" in claim.text


@pytest.mark.parametrize(
    "name, changes, sentence",
    [
        ("rows-released", {"violations": [OVER_BUFFER]}, "the release: no write past a req_to"),
        ("rows-released", {"violations": [], "error": None}, "it served everything"),
        ("rows-widened", {"violations": [OVER_ROW]}, "with the row alone: no write past a kernel"),
        ("rows-tree-page1", {"violations": [OVER_ROW]}, "rows-tree-page1: rank 0: req_to_token"),
        (
            "rows-chain-page4",
            {"idle_ranks": [*range(7)]},
            "7 of 8 ranks passed SGLang's",
        ),
        ("rows-control", {"idle_ranks": []}, "0 of 1 ranks passed"),
        ("rows-chain-page1", {"outputs": [[5, 6], [7, 9]]}, "request 1: token 1 is 9, 8 there"),
        ("rows-control", {"outputs": [], "logprobs": []}, "2 requests answered, 0 there"),
    ],
)
def test_what_does_not_hold(name, changes, sentence):
    found = reports()
    found[name] = replace(found[name], **changes)
    claim = claim_of(found)
    assert not claim.ok and sentence in claim.text


def test_the_runs():
    specs = boot_rows.specs(8, 8, "cpu")
    assert {*specs} == {*boot_rows.RUNS}
    loads = {(s.prompts, s.max_new_tokens, s.context, s.bounds) for s in specs.values()}
    assert len(loads) == 1  # tokens are comparable
    assert {(s.tp, s.dcp, s.page, s.topk) for s in specs.values() if s.draft} == {
        (1, 1, 1, 4), (1, 1, 4, 4), (8, 8, 1, 1), (8, 8, 4, 1),
    }  # fmt: skip
    spec = specs["rows-tree-page1"]
    assert (spec.steps, spec.topk, spec.draft_tokens) == (5, 4, 8)
    assert {len(prompt) + spec.max_new_tokens for prompt in spec.prompts} == {spec.context}


def test_the_stacks_of_the_runs_that_are_meant_to_stop():
    stack = series.load()
    assert stack.upto(boot_rows.STACK["rows-released"]).prs == ()
    widened = [pr.id for pr in stack.upto(boot_rows.STACK["rows-widened"]).prs]
    assert "req-rows" in widened and "attention-tables" not in widened


def test_the_steps_of_a_pair():
    assert choose(None, Pair.MQA) == [*Step]
    assert choose(None, Pair.MLA) == [*Step][:4]
    assert choose([Step.ROWS, Step.SERVE, Step.ROWS], Pair.MQA) == [Step.ROWS, Step.SERVE]


def test_rows_of_the_mla_pair():
    done = subprocess.run(
        [sys.executable, "-m", "kvgeom.cli", "boot", "--pair", "mla", "--step", "rows"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert "--step rows runs at pages of 1 and 4" in done.stderr
    assert "Traceback" not in done.stderr
