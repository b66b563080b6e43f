"""`kvgeom boot` from end to end on the real engine; what the series leaves alone stays alike."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import generate
import psutil
import pytest
from conftest import REPOSITORY
from engine_fixtures import report_of

from kvgeom import boot_checks, boot_rows
from kvgeom.cpu_engine import EngineReport, EngineSpec
from kvgeom.cpu_engine.spec import decode
from kvgeom.deployment import published

pytestmark = pytest.mark.engine

COMMAND = [sys.executable, "-m", "kvgeom.cli", "boot"]


@pytest.fixture(scope="module")
def result_of(tmp_path_factory) -> Callable[[str], dict]:
    """result_of(pair) -> the JSON of one whole run, with the text it printed."""

    @functools.cache
    def of(pair: str) -> dict:
        target = tmp_path_factory.mktemp("boot") / "result.json"
        command = [*COMMAND, "--pair", pair, "--json", str(target)]
        env = {**os.environ, "COLUMNS": "100"}  # as docs/generate.py
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return {**json.loads(target.read_text()), "pair": pair, "text": done.stdout}

    return of


@pytest.fixture(scope="module", params=["mqa", "mla"])
def result(request, result_of) -> dict:
    return result_of(request.param)


def report(result: dict, run: str) -> EngineReport:
    return decode(EngineReport, result["runs"][run])


def test_every_claim_holds(result):
    steps = ["geometry", "serve", "refuse", "overrun"]
    steps += ["rows", "tokens"] if result["pair"] == "mqa" else []
    assert [c["step"] for c in result["claims"]] == steps
    assert result["ok"] and all(c["ok"] for c in result["claims"])
    assert [line[:2] for line in result["text"].splitlines()[-len(steps) :]] == ["ok"] * len(steps)


def test_the_geometry_is_alike_on_every_rank(result):
    patched = report(result, "patched")
    assert [g.rank for g in patched.geometry] == [*range(8)]
    assert sorted(g.dcp_rank for g in patched.geometry) == [*range(8)]
    assert result["rank_differences"] == []
    for g in patched.geometry:
        assert g.draft_shares_allocator
        assert g.allocator.page_size == g.draft.page_size == 8 * g.target.page_size
        assert g.draft.rows == g.allocator.size + g.allocator.page_size == 8 * g.target.rows
    rows = {row["structure"]: row for row in result["table"]}
    assert [*rows] == ["allocator", "target pool", "draft pool", "req_to_token"]
    assert all(row["covers"] for name, row in rows.items() if name != "allocator")


def test_a_full_cache_is_served_as_the_control_does(result):
    patched, control = report(result, "patched"), report(result, "control")
    assert patched.peak_token_usage >= 0.97
    assert patched.outputs == control.outputs and all(patched.outputs)
    assert len({tuple(o) for o in patched.outputs}) == len(patched.outputs)
    assert result["comparison"]["tokens"] == sum(map(len, control.outputs))
    assert result["comparison"]["max_logprob_difference"] <= 1e-4
    # Drafts are verified, so tokens never show a broken draft cache; how many are accepted does.
    assert patched.accept_lengths == pytest.approx(control.accept_lengths)
    assert min(patched.accept_lengths) > 1


def test_the_refusal_has_the_numbers_of_the_engine(result):
    first = report(result, "patched").geometry[0]
    page = first.target.page_size
    assert boot_checks.mismatch(report(result, "refuse")) == {
        "pool": page,
        "allocator": first.allocator.page_size,
        "reaches": first.allocator.size + first.allocator.page_size,
        "valid_to": first.draft.size + page,
    }
    assert not report(result, "refuse").outputs


def test_the_overrun_is_the_first_row_that_is_missing(result):
    run = report(result, "overrun")
    built, first = run.geometry[0], report(result, "patched").geometry[0]
    assert built.draft.rows == first.draft.size + first.target.page_size
    assert sorted(v.rank for v in run.violations) == [*range(8)]
    for violation in run.violations:
        assert violation.structure == "draft"
        assert violation.index == violation.limit == violation.loc == built.draft.rows
        assert violation.allocator_page == first.allocator.size // first.allocator.page_size
    assert run.violations[0].message in result["text"]


def test_rows_hold_a_request_up_to_the_context_limit(result):
    if result["pair"] == "mla":
        assert not [name for name in result["runs"] if name.startswith("rows")]
        return
    runs = {name: report(result, name) for name in boot_rows.RUNS}
    control = runs.pop("rows-control")
    for name, stopped in [(n, runs.pop(n)) for n in boot_rows.STACK]:
        first = stopped.violations[0]
        wrong = {"rows-released": "req_to_token", "rows-widened": "kernel"}[name]
        assert first.structure == wrong and first.index >= 0
        assert stopped.error.type == "OutOfBoundsWrite" and not stopped.outputs
    assert len(runs) == 4
    for served in (control, *runs.values()):
        spec = served.spec
        assert served.ok and served.idle_ranks == [*range(spec.tp)] and spec.bounds
        assert served.outputs == control.outputs
        # Up to the limit: SGLang ends a request two tokens before it.
        assert [len(p) + len(o) for p, o in zip(spec.prompts, served.outputs, strict=True)] == [
            spec.context - 2
        ] * 3


def test_the_deployments_are_those_of_plan(result):
    names = [deployment.name for deployment in published.DEPLOYMENTS if result["pair"] == "mqa"]
    assert [deployment["name"] for deployment in result["deployments"]] == names
    page = (REPOSITORY / "README.md").read_text("utf-8")
    shown = generate.blocks(page)["kvgeom plan --published"]
    for deployment in result["deployments"]:
        released, series = (deployment[side]["tokens"] for side in ("installed", "with_series"))
        assert f"| {deployment['name']} | {released:,} | " in shown
        assert f" | {series:,} | " in shown


def told(text: str) -> str:
    """Without what differs from run to run and from machine to machine."""
    text = re.sub(r"\d+ s, [\d.]+ GiB|within [\d.e-]+|rank \d+|copy of \S+", "", text)
    return " ".join(text.split())


def test_the_docs_show_what_it_prints(result):
    if result["pair"] == "mla":
        return
    page = (REPOSITORY / "docs/fault.md").read_text("utf-8")
    shown = generate.blocks(page)["kvgeom boot"]
    assert told(shown) == told(generate.block("kvgeom boot", result["text"])), "make docs"


@pytest.fixture(scope="module")
def unaffected(
    result_of, patched_engines, released_engines
) -> tuple[list[EngineReport], list[EngineReport]]:
    """With the series and as released: runs without DCP, and with DCP 8 and no draft."""
    plain = EngineSpec(pair="mqa", draft=False)
    patched = [report(result_of(pair), "control") for pair in ("mqa", "mla")]
    assert [r.spec for r in patched] == [
        EngineSpec(pair=pair, tp=1, dcp=1).resolved() for pair in ("mqa", "mla")
    ]
    released = [EngineSpec(pair=pair, tp=1, dcp=1) for pair in ("mqa", "mla")] + [plain]
    return (
        [*patched, report_of(patched_engines, plain)],
        [report_of(released_engines, spec) for spec in released],
    )


def test_unaffected_configurations_answer_as_the_release(unaffected):
    for patched, released in zip(*unaffected, strict=True):
        assert patched.ok and released.ok
        found = boot_checks.compare(patched, released)
        assert found.differences == [] and found.tokens > 0
        for mine, theirs in zip(patched.geometry, released.geometry, strict=True):
            # Rows end with the allocator's last page; they were up to a page longer.
            assert mine.req_to_token.width <= theirs.req_to_token.width
            assert replace(mine, req_to_token=theirs.req_to_token) == theirs


def test_an_interrupt_leaves_nothing(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.Popen(
        [*COMMAND, "--step", "geometry"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=REPOSITORY,
        # A shell starts what it runs in the background with this signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for line in run.stderr:
        if line.startswith("patched: boot"):
            break
    family, deadline = [], time.monotonic() + 120
    while len(family) < 6 and time.monotonic() < deadline:  # some ranks are up
        time.sleep(0.5)
        family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 6
    run.send_signal(signal.SIGINT)
    rest = run.communicate(timeout=60)
    assert run.returncode == 130, rest
    assert rest[0] == "" and "Traceback" not in rest[1]
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert [*tmp_path.iterdir()] == []
