"""The workflows call the make targets that .ci/run calls, with pinned actions and few rights."""

from __future__ import annotations

import re

import pytest
import yaml
from conftest import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow(path):
    text = path.read_text()
    flow = yaml.safe_load(text)
    assert flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
            else:
                assert step["run"].split()[0] == "make"
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")


def test_ci_runs_what_the_workflow_runs():
    ci = [line.split()[1] for line in (REPOSITORY / ".ci/run").read_text().splitlines()
          if line.startswith("make ")]  # fmt: skip
    flow = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())
    assert sorted(flow["jobs"]["make"]["strategy"]["matrix"]["target"]) == sorted(ci)
    assert {*ci, "drift"} <= TARGETS
