"""The 8-GPU tests without 8 GPUs: their scenarios on the CPU engine, and their server arguments
through SGLang's own resolution."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from eight_gpu_client import FakeClient, kit, said

from kvgeom.cpu_engine import EngineReport, EngineSpec, session

pytestmark = pytest.mark.engine

CASES = REPOSITORY / "test/registered/spec/test_dcp8_draft_geometry.py"


def assert_passed(report: EngineReport) -> None:
    assert report.error is None, report.error
    assert not report.violations
    assert report.idle_ranks == [*range(report.spec.tp)]


def test_full_load_at_dcp8(patched_engines):
    report = patched_engines.run(EngineSpec(pair="mqa", max_running=2, scenario="full_load"))
    assert_passed(report)
    assert [len(tokens) for tokens in report.outputs] == [8] * 4
    assert report.peak_token_usage == 1
    rank = report.geometry[0]
    assert rank.draft.page_size == rank.allocator.page_size == 8 * rank.target.page_size


def test_context_limit_with_a_tree(patched_engines):
    spec = EngineSpec(
        pair="mqa", tp=1, dcp=1, page=1, steps=5, topk=4, draft_tokens=8, context=24,
        max_total_tokens=384, max_running=3, bounds=True, scenario="context_limit",
    )  # fmt: skip
    report = patched_engines.run(spec)
    assert_passed(report)
    assert [len(tokens) for tokens in report.outputs] == [6] * 3
    assert report.max_req_to_token_end > spec.context  # the columns past it were used


ROUND_TRIP = EngineSpec(
    pair="mla", algorithm="DSPARK", hicache=True, max_total_tokens=192, max_running=2,
    scenario="host_round_trip",
)  # fmt: skip


def test_host_round_trip_at_dcp8(patched_engines):
    report = patched_engines.run(ROUND_TRIP, timeout=600)
    assert_passed(report)
    assert report.cached_tokens == [0, 512, 512]
    assert report.outputs[1] == report.outputs[2]
    assert report.host_rows["target back"] > 0 and report.host_rows["draft back"] > 0


def test_draft_rows_that_stay_on_the_host(patched_engines):
    """Tokens and cached tokens are right; the draft is right at other places."""
    spec = dataclasses.replace(  # as many locs in as wide pages, on half the ranks
        ROUND_TRIP, tp=4, dcp=4, page=64, max_total_tokens=384, faults=("draft-load-back",)
    )
    report = patched_engines.run(spec, timeout=600)
    assert report.error.type == "AssertionError"
    assert report.error.message.startswith("accept length ")


def test_a_scenario_that_is_not_in_the_tree(patched_engines):
    report = patched_engines.run(EngineSpec(scenario="no_such_load"))
    assert report.error.type == "EngineSetupError"
    assert "scenario 'no_such_load' is not in this tree" in report.error.message


def test_refused_by_the_source_patcher(patched_copy, running, tmp_path, monkeypatch):
    """SGLang patches itself as its environment says, and does not boot."""
    config = tmp_path / "revert.yaml"
    config.write_text(kit.REVERT_DRAFT_PAGE)
    for name, value in kit.revert_draft_page_env(str(config)).items():
        monkeypatch.setenv(name, value)
    with session(patched_copy, running=running) as opened:
        report = opened.run(EngineSpec(pair="mqa"))
    assert (report.error.stage, report.error.type) == ("boot", "PageGeometryError")
    kit.refused(report.error.message, page_size=4, dcp_size=8)


@pytest.fixture(scope="module")
def resolved(patched_copy) -> dict[str, dict]:
    """What SGLang makes of each class's server arguments."""
    script = Path(__file__).with_name("eight_gpu_arguments.py")
    path = os.pathsep.join([str(patched_copy), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, str(script), str(CASES)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# class -> DCP, page, algorithm, the scenario that runs with these arguments, tests
REFUSED = ["test_a_draft_paged_as_scheduled_does_not_boot"]
FULL = ["test_every_page_in_use", "test_gsm8k"]
EXPECTED = {
    "TestKimiLinearDSpark": (8, 64, "DSPARK", "full_load", FULL),
    "TestKimiLinearDSparkRefused": (8, 64, "DSPARK", "full_load", REFUSED),
    "TestDeepSeekEagle": (8, 64, "EAGLE", "full_load", FULL),
    "TestDeepSeekEagleRefused": (8, 64, "EAGLE", "full_load", REFUSED),
    "TestDSparkHostRoundTrip": (
        8, 64, "DSPARK", "host_round_trip", ["test_evicted_prompt_comes_back"],
    ),
    "TestTreeDraftAtContextLimit": (
        1, 1, "EAGLE3", "context_limit", ["test_several_at_once_as_one_at_a_time"],
    ),
}  # fmt: skip


def test_every_class_and_its_tests(resolved):
    assert {name: case["tests"] for name, case in resolved.items()} == {
        name: tests for name, (*_, tests) in EXPECTED.items()
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_launch_resolves_to(resolved, name):
    found = resolved[name]["blackwell"]
    assert isinstance(found, dict), found
    dcp, page, algorithm, scenario, _ = EXPECTED[name]
    assert (found["tp_size"], found["dcp_size"], found["page_size"]) == (8, dcp, page)
    assert found["speculative_algorithm"] == algorithm
    assert found["enable_hierarchical_cache"] is (scenario == "host_round_trip")
    assert found["load_snapshot_publish_interval"] == 1
    assert (found["speculative_eagle_topk"] > 1) is (scenario == "context_limit")
    # What the scenario reads from such a server is all there, and fits.
    capacity = (found["max_total_tokens"] or 0) * dcp
    assert said(scenario, FakeClient(**found, max_total_num_tokens=capacity)) == ""


@pytest.mark.parametrize("name", [name for name, case in EXPECTED.items() if case[0] == 8])
def test_what_hopper_says(resolved, name):
    """Why the runner is a Blackwell one."""
    assert "only supported on Blackwell" in resolved[name]["hopper"]
