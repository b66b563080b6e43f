"""`kvgeom plan` on the older releases that it knows, as they are and with the series."""

from __future__ import annotations

import pytest
from conftest import RELEASE, import_path
from launch_commands import COMMANDS
from launch_families import FAMILIES
from plan_answers import asked, both

from kvgeom import plan_cli, tree
from kvgeom.deployment.run import planner
from kvgeom.deployment.verdict import rows, verdict

NAMES = ("tree page 1", "swa dcp", "hisparse", "hicache")


@pytest.fixture(scope="module")
def ask(running):
    with planner(running) as opened:
        yield opened


@pytest.fixture(scope="module", params=[r for r in plan_cli.RELEASES if r != RELEASE])
def planned(request, ask):
    """(release, planned[name] -> (the release's answer, the series'))."""
    requests = {name: asked((COMMANDS | FAMILIES)[name]) for name in NAMES}
    return request.param, both(ask, tree.find(import_path(request.param)[0]), requests)


def figures(plan, structure: str) -> tuple[int, int]:
    assert plan.stop is None, plan.stop
    row = next(row for row in rows(plan) if row.structure == structure)
    return row.rows, row.reach


def test_what_each_release_comes_to(planned):
    release, answers = planned
    for plan in (plan for pair in answers.values() for plan in pair):
        assert plan.release == release

    released, with_series = answers["tree page 1"]
    assert "writes 24 columns past" in verdict(released).text
    assert verdict(with_series).word == "safe"

    released, with_series = answers["swa dcp"]
    have, reach = figures(released, "draft pool")
    assert have == 8 * (reach - 64) + 512
    assert figures(with_series, "draft pool")[0] == figures(with_series, "draft pool")[1]

    for plan in answers["hicache"]:
        assert figures(plan, "host pool kv")[0] * 8 == figures(plan, "host pool draft")[1]
        assert verdict(plan).word == "safe", verdict(plan)


def test_a_draft_beside_hisparse_had_half_its_rows(planned):
    """The draft's pool was as large as the device's, and is indexed by twice as many locs."""
    release, answers = planned
    released, with_series = answers["hisparse"]
    assert verdict(with_series).word == "safe", verdict(with_series)
    have, reach = figures(released, "draft pool")
    if release == "0.5.21":
        assert verdict(released).word == "unsafe" and 2 * (have - 64) == reach - 64
    else:
        assert verdict(released).word == "safe" and have == reach
