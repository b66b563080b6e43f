"""`kvgeom plan --published`, and servers that the series leaves as they are: the installed release
against a copy with the series, by SGLang's own configurators."""

from __future__ import annotations

import io
import json
import math

import generate
import pytest
import torch
from launch_commands import PLAIN
from rich.console import Console

from kvgeom import boot_tokens
from kvgeom.deployment import published
from kvgeom.deployment.published import DEPLOYMENTS, Side
from kvgeom.deployment.spec import Stop, TreePlan


@pytest.fixture(scope="module")
def answers(planned):
    """(the release's, the series') of the deployments, then of the plain servers by name."""
    deployments = zip(*(planned[deployment.name] for deployment in DEPLOYMENTS), strict=True)
    plain = [{name: planned[name][side] for name in PLAIN} for side in (0, 1)]
    return [list(plans) for plans in deployments], plain


def test_the_readme_shows_the_table(answers):
    shown = generate.blocks((generate.REPOSITORY / "README.md").read_text("utf-8"))
    assert shown["kvgeom plan --published"] == published.markdown(*answers[0]), "make docs"


def test_what_is_charged_is_what_is_built_with_the_series(answers):
    for deployment, plan in zip(DEPLOYMENTS, answers[0][1], strict=True):
        assert plan.stop is None, (deployment.name, plan.stop)
        assert Side.of(plan).over == pytest.approx(1, abs=1e-3), deployment.name
        assert {pool.owner for pool in plan.capacity.kv} == {"target", "draft"}


def test_fewer_tokens_exactly_where_the_release_over_commits(answers):
    released, with_series = [[Side.of(plan) for plan in plans] for plans in answers[0]]
    for deployment, was, now in zip(DEPLOYMENTS, released, with_series, strict=True):
        assert (now.tokens < was.tokens) == (was.over > 1.005), deployment.name
        assert now.tokens <= was.tokens or was.over < 0.995, deployment.name
    assert any(side.over > 1.005 for side in released)


# `kvgeom boot --step tokens`


def test_the_claim_of_boot(answers):
    claim = boot_tokens.tokens_claim(answers[0])
    assert claim.ok, claim.text
    assert claim.text.endswith("up to 8.0 times its budget in 3 of them")


def test_pools_that_take_more_than_they_are_charged(answers):
    """The release in place of the series."""
    released, _ = answers[0]
    claim = boot_tokens.tokens_claim((released, released))
    assert not claim.ok
    assert claim.text.startswith(f"{DEPLOYMENTS[0].name}: the pools take 1.113 of what is charged")


def test_a_release_that_over_commits_nothing(answers):
    _, with_series = answers[0]
    assert not boot_tokens.tokens_claim((with_series, with_series)).ok


def test_a_deployment_that_is_refused(answers):
    refused = [TreePlan("0.5.23", stop=Stop("sglang", "ValueError", "no")), *answers[0][1][1:]]
    claim = boot_tokens.tokens_claim((answers[0][0], refused))
    assert (claim.ok, claim.text) == (False, f"{DEPLOYMENTS[0].name}: no")


def test_what_boot_shows(answers):
    out = io.StringIO()
    boot_tokens.show(Console(file=out, width=140), answers[0])
    for deployment, *plans in zip(DEPLOYMENTS, *answers[0], strict=True):
        (line,) = [line for line in out.getvalue().splitlines() if deployment.name in line]
        for side in map(Side.of, plans):
            built = side.tokens * side.allocated / 2**30
            assert f"{side.tokens:,}" in line and f"{built:.1f} / " in line


# servers that the series leaves alone


def sizes(buffers) -> int:
    """Bytes of buffers as listed."""
    dtype = {f"torch.{name}": getattr(torch, name) for name in ("bfloat16", "uint8", "int64")}
    return sum(n * math.prod(shape) * dtype[kind].itemsize for _, n, shape, kind in buffers)


@pytest.mark.parametrize("kind", PLAIN)
def test_without_dcp_and_draft_every_pool_is_as_it_was(answers, kind):
    released, with_series = (plans[kind] for plans in answers[1])
    assert released.stop is None, released.stop
    assert released.tokens > 0 and released.capacity.kv
    for pool in released.capacity.kv:
        kv = [b for b in pool.buffers if not b[0].endswith("_index_mapping")]
        assert sizes(kv) == pool.size > 0
    assert with_series == released


def test_a_pool_that_differs_is_seen(answers):
    """The comparison above, on a server that the series does change."""
    released, with_series = (plans[0] for plans in answers[0])
    assert DEPLOYMENTS[0].name.startswith("DeepSeek-V3")
    assert released.capacity.kv != with_series.capacity.kv


# the command


def run_command(monkeypatch, answers, *options: str):
    from typer.testing import CliRunner

    from kvgeom.cli import app

    monkeypatch.setattr(published, "answers", lambda *args: answers)
    return CliRunner().invoke(app, ["plan", *options])


def test_the_command(answers, monkeypatch):
    done = run_command(monkeypatch, answers[0], "--published")
    assert (done.exit_code, done.stdout) == (0, published.markdown(*answers[0]))
    found = json.loads(run_command(monkeypatch, answers[0], "--published", "--json").stdout)
    assert [d["name"] for d in found["deployments"]] == [d.name for d in DEPLOYMENTS]
    first = found["deployments"][0]
    for key, plans in zip(("installed", "with_series"), answers[0], strict=True):
        assert first[key]["tokens"] == plans[0].tokens
        assert first[key]["charged"] == plans[0].capacity.charged
        assert first[key]["plan"]["capacity"]["kv"][1]["owner"] == "draft"


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--published", "--", "--model-path", "x"], "has its own launch commands"),
        (["--published", "--weights", "20"], "has its own launch commands and weights"),
        (["--published", "--svg", "x.svg"], "has its own launch commands and weights, and no pic"),
    ],
)
def test_one_thing_at_a_time(monkeypatch, options, sentence):
    done = run_command(monkeypatch, None, *options)
    assert done.exit_code != 0 and sentence in str(done.exception)


def test_a_refusal_is_the_row(answers):
    """With SGLang's own words, and no number."""
    words = "DSA DCP does not support HiSparse or HiCache."
    refused = TreePlan("0.5.23", stop=Stop("sglang", "ValueError", words))
    plans = [[refused, *side[1:]] for side in answers[0]]
    row = published.markdown(*plans).splitlines()[2]
    assert row.count(words) == 2 and row.endswith("| refused |")
