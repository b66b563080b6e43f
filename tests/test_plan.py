"""`kvgeom plan` on the real release and on a copy with the series: pools, rows, refusals."""

from __future__ import annotations

import json
from contextlib import contextmanager
from xml.etree import ElementTree

import plan_answers
import pytest
from launch_commands import COMMANDS
from typer.testing import CliRunner

from kvgeom import plan_cli, tree
from kvgeom.cli import app
from kvgeom.deployment import run, svg
from kvgeom.deployment.verdict import rows, verdict


def figures(plan, structure: str):
    row = next(row for row in rows(plan) if row.structure == structure)
    return row.size, row.page, row.rows, row.reach, row.covers


def test_a_draft_under_dcp_is_covered(planned):
    for plan in planned["mla dcp"]:
        assert verdict(plan).word == "safe", verdict(plan)
        allocator = plan.geometry.allocator
        assert allocator.page_size == 512 and plan.settings["page_size"] == 64
        assert allocator.size == plan.tokens * 8
        size, page, have, reach, covers = figures(plan, "draft pool")
        assert (size, page, covers) == (allocator.size, 512, True) and have == reach
        assert figures(plan, "target pool")[:3] == (plan.tokens, 64, plan.tokens + 64)
        assert plan.geometry.draft_shares_allocator


def test_the_known_fault_is_unsafe_on_the_release_and_safe_with_the_series(planned):
    released, with_series = planned["tree page 1"]
    assert verdict(released).word == "unsafe" and verdict(with_series).word == "safe"
    assert "writes 24 columns past" in verdict(released).text
    use, table = released.row_use, released.geometry.req_to_token
    assert (use.committed, use.reserve) == (131072 - 4, 40)
    assert use.ends_at - table.width == 24 and table.width == 131072 + 12
    assert use.overruns_from == table.width - 40 + 1
    assert with_series.geometry.req_to_token.width == use.ends_at


def test_a_models_own_draft_layer_stores_its_share(planned):
    """Its pool is as large as a replicated one, and it translates."""
    for plan in planned["mtp dcp"]:
        assert verdict(plan).word == "safe", verdict(plan)
        draft = plan.geometry.pool("draft pool")
        assert draft.ids_per_row == 8 and draft.page_size == 512


@pytest.mark.parametrize(
    "name, table, missing",
    [
        ("tree page 16", "triton draft index buffer", 6),
        ("tree page 1", "triton draft index buffer", 6),
        ("chain fa3", "fa3 verify table", 4),
        ("chain fa3", "fa3 draft table", 2),
    ],
)
def test_attention_tables_end_at_the_context_length_on_the_release(planned, name, table, missing):
    released, with_series = planned[name]
    *_, have, reach, covers = figures(released, table)
    context = released.geometry.req_to_token.context_len
    assert (reach - have, covers, have) == (missing, False, context)
    assert verdict(released).word == "unsafe" and verdict(with_series).word == "safe"
    assert figures(with_series, table)[3:] == (reach, True)


def test_a_trees_prefix_table_holds_the_committed_tokens(planned):
    """Verify and draft keep a tree's own tokens in a second table."""
    for name, covers in zip(("released", "with series"), (False, True), strict=True):
        plan = planned["tree fa3"][name == "with series"]
        for table in ("fa3 verify table", "fa3 draft table"):
            *_, have, reach, found = figures(plan, table)
            assert (found, reach) == (covers, 8192 - 4 + 5 + 1), (name, table, have)


def test_a_table_alone_is_the_fault(planned):
    for name, table in (("tree page 16", "triton draft index"), ("chain fa3", "fa3 verify table")):
        assert verdict(planned[name][0]).text.startswith(f"the {table}")
        assert figures(planned[name][0], "req_to_token")[-1] is True


@pytest.mark.parametrize("name", ["standalone", "ngram", "block dcp"])
def test_other_algorithms(planned, name):
    for plan in planned[name]:
        assert plan.stop is None, plan.stop
        assert (plan.geometry.pool("draft pool") is None) == (name == "ngram")
        assert figures(plan, "req_to_token")[-1] is True
    if name == "block dcp":
        size, page, have, reach, covers = figures(plan, "draft pool")
        assert (size, page, have, covers) == (plan.tokens * 8, 512, reach, True)
        assert plan.settings["speculative_num_draft_tokens"] == 8
        assert "not looked at: page tables" in verdict(plan).text


def test_a_hybrid_linear_model(planned):
    for plan in planned["linear"]:
        assert verdict(plan).word == "safe"
        assert figures(plan, "target pool")[:3] == (plan.tokens, 1, plan.tokens + 1)


def test_without_a_draft(planned):
    for plan in planned["plain"]:
        assert verdict(plan).word == "safe" and plan.geometry.draft_shares_allocator is None
        assert plan.not_planned == []


def test_capacity_is_sglangs(planned):
    """A GQA cell of tp 8: one KV head of 128, K and V, 80 layers, two bytes each."""
    plan = planned["plain"][0]
    budget = 141 * plan.settings["mem_fraction_static"] - 20
    assert plan.tokens == pytest.approx(budget * 2**30 / (2 * 128 * 2 * 80), rel=1e-3)
    assert planned["capped"][0].tokens == 65536


def test_refusals_are_sglangs_own_words(planned):
    for plan in planned["refused"]:
        found = verdict(plan)
        assert found.word == "refused" and plan.stop.by == "sglang"
        assert "only supports DSPARK" in found.text
    assert "Raise --mem-fraction-static above" in verdict(planned["too much"][0]).text


@pytest.mark.parametrize(
    "name, by, sentence",
    [
        ("typo", "arguments", "unrecognized arguments: --dpc-size 8"),
        ("no model", "kvgeom", "--model-path /nowhere: there is no such folder"),
        ("no config", "kvgeom", "there is no config.json in it"),
        ("unreadable", "kvgeom", "its config.json cannot be read"),
        ("unified", "kvgeom", "a plan does not cover --enable-unified-memory"),
    ],
)
def test_wrong_arguments_are_one_sentence(planned, name, by, sentence):
    plan = planned[name][0]
    assert plan.stop.by == by and sentence in plan.stop.message
    with pytest.raises(plan_cli.KvgeomError) as raised:
        plan_cli._check_planned(plan)
    assert raised.value.exit_code == 2 and sentence in raised.value.message
    assert "\n" not in raised.value.message


# the command


def test_an_unsafe_command(planned, tmp_path, monkeypatch):
    """With the answers that SGLang gave before; tests/test_docs.py runs one as a user does."""
    released, with_series = planned["tree page 1"]

    @contextmanager
    def planner():
        def ask(package, request):
            assert request == plan_answers.asked(COMMANDS["tree page 1"])
            return [released if package == tree.find(None).package else with_series]

        yield ask

    monkeypatch.setattr(run, "planner", planner)
    picture = tmp_path / "plan.svg"
    picture.write_text("an older one")
    whole = ["python", "-m", "sglang.launch_server", *COMMANDS["tree page 1"]]
    options = ["--weights", "20", "--svg", str(picture)]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", *options, "--", *whole])
    assert done.exit_code == 1, done.output
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("unsafe: a decode step writes 24 columns past")
    assert second.startswith("with the series: safe: ")
    assert "24 of them missing" in done.stdout
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.svg"]


def run_command(monkeypatch, answers, *options: str) -> tuple[int, str]:
    """The command on answers that SGLang gave before."""
    monkeypatch.setattr(plan_cli, "_plans", lambda request, stack, found, console: answers)
    done = CliRunner().invoke(app, ["plan", *options, "--", "x"])
    return done.exit_code, done.stdout


def test_exit_status_and_json(planned, monkeypatch):
    for name, status, word in (
        ("mla dcp", 0, "safe"),
        ("tree page 1", 1, "unsafe"),
        ("refused", 2, "refused"),
    ):
        code, printed = run_command(monkeypatch, planned[name], "--json")
        assert code == status
        found = json.loads(printed)
        assert found["verdict"] == found["installed"]["verdict"] == word
        assert found["kvgeom"] and found["tree"] and found["request"]["gpu_memory"] == 141.0
        for key in ("installed", "with_series"):
            part = found[key]
            assert part["release"] == "0.5.23"
            assert (part["stop"] is None) == (part["verdict"] != "refused")
            structures = {row["structure"]: row for row in part["structures"]}
            if part["stop"] is None:
                assert {"allocator", "target pool", "draft pool", "req_to_token"} <= set(structures)
                assert {table["name"] for table in part["tables"]} <= set(structures)
                assert set(part["row_use"]) == {"committed", "reserve", "ends_at", "overruns_from"}
                assert part["geometry"]["dcp_size"] == part["settings"]["dcp_size"]
        code, printed = run_command(monkeypatch, planned[name])
        assert code == status and printed.startswith(f"{word}: ")


def test_memory_that_the_release_does_not_charge_is_told(planned, monkeypatch):
    for name, told in (("mtp dcp", True), ("tree page 1", False)):
        released, with_series = (plan.tokens for plan in planned[name])
        assert (with_series < released) == told
        printed = run_command(monkeypatch, planned[name])[1].splitlines()[2]
        assert printed.startswith(f"over-committed: {released} KV tokens") == told
        assert printed.endswith(f", {with_series}") == told


def test_a_picture_of_every_answer_is_well_formed(planned):
    for name in ("mla dcp", "tree page 1", "plain", "refused"):
        root = ElementTree.fromstring(svg.picture(*planned[name]))
        words = [element.text for element in root.iter() if element.tag.endswith("text")]
        assert any(str(verdict(planned[name][0]).word) in text for text in words)
        bars = [e for e in root.iter() if e.get("fill") == "#c0392b"]
        assert bool(bars) == (verdict(planned[name][0]).word == "unsafe")
