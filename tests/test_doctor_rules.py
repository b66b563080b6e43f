"""Which faults arguments reach: against the series' own figures, and against SGLang's functions."""

from __future__ import annotations

import pytest

from kvgeom import exposure, launch, series
from kvgeom.exposure import Grade

EVERY = {"draft-pool-page", "req-rows", "attention-tables", "draft-host-pool", "dspark-hicache"}
EVERY |= {"draft-budget"}
STACK = series.load()
EDITS = {(e.file, e.id) for pr in STACK.prs for e in pr.edits}


def server(text: str) -> launch.Launch:
    return launch.from_arguments(text.split(), "x")


def spec(algorithm: str, shape: str, *, page: int = 1, dcp: int = 1) -> launch.Launch:
    steps, topk, tokens = shape.split("/")
    return server(
        f"--page-size {page} --dcp-size {dcp} --speculative-algorithm {algorithm} "
        f"--speculative-num-steps {steps} --speculative-eagle-topk {topk} "
        f"--speculative-num-draft-tokens {tokens} --context-length 131072"
    )


def found(text: str, prs: set[str] = EVERY, edits=EDITS) -> dict[str, Grade]:
    rules = exposure.findings(server(text), prs, edits, headroom_is_widened=True)
    return {f.pr: f.grade for f in rules}


@pytest.mark.parametrize(
    "algorithm, shape, page, dcp, past",
    [
        ("EAGLE", "3/1/4", 1, 1, 0),
        ("EAGLE3", "5/4/8", 1, 1, 24),
        ("EAGLE3", "5/4/8", 64, 1, 0),
        ("NGRAM", "1/10/12", 1, 1, 4),
        ("DFLASH", "1/1/16", 1, 1, 8),
        ("DSPARK", "1/1/8", 64, 8, 0),
    ],
)
def test_entries_past_a_row(algorithm, shape, page, dcp, past):
    """The figures are those of the PR text of `req-rows`."""
    launched = spec(algorithm, shape, page=page, dcp=dcp)
    assert exposure.entries_past_row(launched, headroom_is_widened=True) == past


@pytest.mark.parametrize("dcp, past", [(1, 52), (8, 500)])
def test_entries_past_a_row_of_unified_memory(dcp, past):
    words = f"--enable-unified-memory --page-size 64 --dcp-size {dcp} --context-length 131072 "
    launched = server(words + "--speculative-algorithm DSPARK --speculative-num-draft-tokens 8")
    assert exposure.entries_past_row(launched, headroom_is_widened=True) == past


def test_a_release_that_does_not_widen_its_headroom():
    launched = spec("DSPARK", "1/1/8", page=64, dcp=8)
    # 16 tokens on top of the context in pages of 512, in a row of 16 + 63 more.
    assert exposure.entries_past_row(launched, headroom_is_widened=False) == 512 - 79


def test_no_speculation_and_no_hicache_reach_nothing():
    assert found("--dcp-size 8 --page-size 64 --attention-backend cutedsl_mla") == {}
    assert found("") == {}


def test_speculation_reaches_the_tables_of_most_backends():
    words = "--speculative-algorithm EAGLE --speculative-num-steps 3 --page-size 64 "
    assert found(words) == {"attention-tables": Grade.MODEL}
    assert found(words + "--attention-backend fa3") == {"attention-tables": Grade.HIT}
    assert found(words + "--attention-backend dsa") == {}
    mixed = words + "--attention-backend dsa --speculative-draft-attention-backend triton"
    assert found(mixed) == {"attention-tables": Grade.HIT}


def test_a_draft_under_dcp_costs_memory_at_most():
    words = "--dcp-size 8 --page-size 64 --attention-backend dsv4 --speculative-algorithm "
    assert found(words + "DSPARK") == {"draft-pool-page": Grade.MEMORY}
    assert found(words + "NGRAM") == {}


def test_hicache_under_dcp():
    words = "--dcp-size 8 --enable-hierarchical-cache "
    assert found(words) == {"draft-host-pool": Grade.MODEL}
    assert found(words + "--attention-backend dsa") == {"draft-host-pool": Grade.HIT}
    assert found("--enable-hierarchical-cache --attention-backend dsa") == {}
    dspark = found(words + "--speculative-algorithm DSPARK")
    assert dspark["dspark-hicache"] is Grade.HIT


def test_hicache_of_a_release_whose_index_keys_are_sharded():
    edits = {e for e in EDITS if e != exposure._INDEX_KEYS}
    words = "--dcp-size 8 --enable-hierarchical-cache --attention-backend dsa "
    assert found(words, edits=edits) == {}
    draft = found(words + "--speculative-algorithm EAGLE", edits=edits)
    assert draft["draft-host-pool"] is Grade.MODEL


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "EAGLE3", "STANDALONE"])
def test_a_draft_under_dcp_that_is_charged_one_row_a_token(algorithm):
    words = f"--page-size 64 --attention-backend cutedsl_mla --speculative-algorithm {algorithm} "
    assert found(words + "--dcp-size 8")["draft-budget"] is Grade.MODEL
    assert "draft-budget" not in found(words)
    text = exposure.findings(
        server(words + "--dcp-size 8"), {"draft-budget"}, EDITS, headroom_is_widened=True
    )[0].text
    assert "8 rows for a token of the KV budget, which charges one" in text


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH", "NGRAM", "FROZEN_KV_MTP"])
def test_a_draft_that_is_charged_all_its_rows_or_has_none(algorithm):
    words = f"--dcp-size 8 --attention-backend cutedsl_mla --speculative-algorithm {algorithm}"
    assert "draft-budget" not in found(words)


def budget(text: str, edits=EDITS) -> str:
    """What is said of the KV budget; "" where nothing is."""
    rules = exposure.findings(server(text), {"draft-budget"}, edits, headroom_is_widened=True)
    return rules[0].text if rules else ""


def test_a_sliding_window_target_is_over_committed_without_any_draft():
    said = budget("--dcp-size 8 --page-size 64 --attention-backend triton")
    assert "a sliding-window or MiniMax model's own pools hold the KV heads of all 8 DCP" in said
    assert budget("--dcp-size 8") == said and budget("--page-size 64") == ""
    both = budget("--dcp-size 8 --speculative-algorithm EAGLE3")
    assert "8 rows for a token" in both and "all 8 DCP ranks" in both
    # A block draft is charged in full, its target is not.
    assert budget("--dcp-size 8 --speculative-algorithm DSPARK") == said


@pytest.mark.parametrize(
    "words",
    ["--attention-backend dsa", "--decode-attention-backend cutedsl_mla",
     "--enable-hierarchical-cache", "--enable-unified-memory"],
)  # fmt: skip
def test_what_no_sliding_window_target_is_served_with_under_dcp(words):
    assert budget(f"--dcp-size 8 {words}") == ""


def test_a_release_that_charges_all_the_heads_of_a_target():
    assert budget("--dcp-size 8", EDITS - {exposure._TARGET_HEADS}) == ""


def test_a_sparse_models_own_draft_is_charged_by_newer_releases():
    words = "--dcp-size 8 --attention-backend dsa --speculative-algorithm "
    older = EDITS - {exposure._DSA_CHARGE}
    assert "draft-budget" not in found(words + "NEXTN")
    assert found(words + "NEXTN", edits=older)["draft-budget"] is Grade.MODEL
    assert found(words + "EAGLE3")["draft-budget"] is Grade.MODEL


def test_the_edits_that_rules_name_are_in_the_series():
    assert {exposure._INDEX_KEYS, exposure._WINDOW_DRAFT, exposure._DSA_CHARGE} <= EDITS
    assert exposure._TARGET_HEADS in EDITS
    assert {pr.id for pr in STACK.prs if pr.red} >= EVERY


def test_a_fault_that_is_mended_is_not_found():
    words = "--speculative-algorithm EAGLE3 --attention-backend triton"
    assert found(words).keys() == {"req-rows", "attention-tables"}
    assert found(words, EVERY - {"req-rows"}).keys() == {"attention-tables"}
    assert found(words, set()) == {}
