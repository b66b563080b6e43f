"""`kvgeom plan` on kinds of KV pools beyond the plain one, on the release and with the series."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvgeom import tree
from kvgeom.deployment import structures
from kvgeom.deployment.show import unused
from kvgeom.deployment.structures import DIVIDES, Stopped
from kvgeom.deployment.verdict import rows, verdict


def figures(plan) -> dict:
    """structure -> (rows, reach, indexed by), of what was built."""
    assert plan.stop is None, plan.stop
    return {row.structure: (row.rows, row.reach, row.index) for row in rows(plan)}


def test_windows(planned):
    """Full rows by loc, window rows by the id that the allocator's table gives."""
    for plan, word in zip(planned["swa"], ("unsafe", "safe"), strict=True):
        found = figures(plan)
        tokens = plan.tokens
        assert found["target pool"] == (tokens + 1, tokens + 1, "raw (loc)")
        have, reach, index = found["target window pool"]
        assert (have, index) == (reach, "raw (window id)") and reach < tokens
        assert found["loc to window table"] == (tokens + 1, tokens + 1, "raw (loc)")
        assert found["draft pool"] == (tokens + 1, tokens + 1, "raw (loc)")
        assert verdict(plan).word == word  # the tables of fa3
        assert "page tables of sliding windows" in plan.not_planned


def test_a_draft_beside_windows_is_widened_for_nothing_on_the_release(planned):
    released, with_series = planned["swa dcp"]
    for plan in planned["swa dcp"]:
        assert verdict(plan).word == "safe", verdict(plan)
        assert plan.geometry.allocator.page_size == 64
    have, reach, _ = figures(released)["draft pool"]
    assert have == 8 * (reach - 64) + 512
    assert unused(released) == [
        f"memory for nothing: {have - reach} of the {have} rows of the draft pool are never indexed"
    ]
    have, reach, _ = figures(with_series)["draft pool"]
    assert have == reach and unused(with_series) == []


def test_index_keys_span_the_locs(planned):
    for plan in planned["dsa dcp"]:
        found, reach = figures(plan), plan.tokens * 8 + 512
        assert found["target pool"][:2] == (plan.tokens + 64, plan.tokens + 64)
        for name in ("target index keys", "draft index keys", "draft pool"):
            assert found[name] == (reach, reach, "raw (loc)"), name


def test_hisparse(planned):
    """The target's rows are device ids; index keys and draft span twice as many locs."""
    for plan in planned["hisparse"]:
        assert verdict(plan).word == "safe", verdict(plan)
        found, tokens = figures(plan), plan.tokens
        assert found["target pool"] == (tokens + 64, tokens + 64, "raw (device id)")
        for name in ("target index keys", "loc to device table", "draft pool"):
            assert found[name] == (2 * tokens + 64, 2 * tokens + 64, "raw (loc)"), name


def test_dflash(planned):
    """A block of 16 on a page of 1: 8 columns past the row on the release."""
    released, with_series = planned["dflash"]
    assert "writes 8 columns past" in verdict(released).text
    assert verdict(with_series).word == "safe"
    for plan in planned["dflash dcp"]:
        assert verdict(plan).word == "safe", verdict(plan)
        assert figures(plan)["draft pool"][:2] == (plan.tokens * 4 + 256,) * 2


def test_a_pool_that_no_backend_divides_locs_for_is_unsafe(planned):
    """MHA under DCP on another backend than triton, on the release and with the series."""
    for plan in planned["undivided"]:
        found = verdict(plan)
        have, reach, index = figures(plan)["target pool"]
        assert (have, reach, index) == (plan.tokens + 64, plan.tokens * 4 + 256, "raw (loc)")
        assert found.word == "unsafe"
        assert "attention backend fa3 writes locs undivided" in found.text
        assert re.search(r"above 2[45]\.\d+% token usage", found.text)


def test_a_pool_without_rows_is_refused():
    with pytest.raises(Stopped) as raised:
        structures._rows(SimpleNamespace(swa_kv_pool=None))
    assert raised.value.stop.by == "kvgeom" and "it has no row per loc" in str(raised.value)


def test_which_backend_divides_locs():
    """For a pool that does not do it itself; the pool that does is asked in `structures`."""
    folder = tree.find(None).package / "srt" / "layers" / "attention"
    dividing = {
        path.name
        for path in folder.glob("*_backend.py")
        if re.search(r"out_cache_loc // self\.\w*dcp_size", path.read_text())
    }
    assert dividing - {"xpu_backend.py"} == {f"{DIVIDES}_backend.py"}


@pytest.mark.parametrize("name, part", [("multi-layer", "pool"), ("window drafts", "window pool")])
def test_a_multi_layer_draft_has_a_pool_a_step(planned, name, part):
    for plan in planned[name]:
        found = figures(plan)
        drafts = [found[f"draft {n} {part}"] for n in (1, 2, 3)]
        assert drafts[0] == drafts[1] == drafts[2]
        assert drafts[0][0] >= drafts[0][1]
        assert "draft 4 pool" not in found and plan.geometry.draft_shares_allocator
    target = found["target window pool" if part == "window pool" else "target pool"]
    assert drafts[0][1:] == target[1:]


def test_host_pools_of_hicache(planned):
    """A draft's follows the KV pool's slots, which the ranks of DCP share."""
    for plan in planned["hicache"]:
        assert verdict(plan).word == "safe", verdict(plan)
        found = figures(plan)
        rows_of_a_rank, reach, index = found["host pool kv"]
        assert (reach, index) == (rows_of_a_rank, "translated (host slot // 8)")
        slots = 8 * rows_of_a_rank
        assert found["host pool draft"] == (slots, slots, "raw (host slot)")
        assert slots >= 2 * plan.tokens * 8
    for name, parts in (
        ("hicache swa", ("kv", "swa", "draft")),
        ("hicache dsa", ("kv", "indexer")),
    ):
        for plan in planned[name]:
            found = figures(plan)
            for part in parts:
                have, reach, index = found[f"host pool {part}"]
                assert have == reach and index == "raw (host slot)", (name, part)


def test_a_host_pool_that_is_short(planned):
    plan = planned["hicache"][0]
    pools = [
        replace(pool, rows=pool.rows // 8) if pool.name == "host pool draft" else pool
        for pool in plan.geometry.pools
    ]
    short = replace(plan, geometry=replace(plan.geometry, pools=pools))
    found = verdict(short)
    assert found.word == "unsafe" and "of the host slots KV is copied past its end" in found.text
    assert "above 12.50% of" in found.text


def test_minimax(planned):
    for plan in planned["minimax"]:
        assert verdict(plan).word == "safe"
        found, tokens = figures(plan), plan.tokens
        for name in ("target pool", "target index pool", "target index key pool"):
            assert found[name] == (tokens + 128, tokens + 128, "raw (loc)"), name


def test_pipeline_stages_share_the_smallest_count(planned):
    """A token takes a KV head of 128, K and V, two bytes, in each layer of a stage."""
    for name, layers in (("pipeline", 40), ("pipeline uneven", 41)):
        for plan in planned[name]:
            assert verdict(plan).word == "safe"
            budget = 141 * plan.settings["mem_fraction_static"] - 20
            expected = budget * 2**30 / (2 * 128 * 2 * layers)
            assert plan.tokens == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["uno", "frozen"])
def test_algorithms_without_rows_of_a_draft(planned, name):
    for plan in planned[name]:
        assert plan.geometry.draft_shares_allocator is None
        assert figures(plan)["req_to_token"][0] >= figures(plan)["req_to_token"][1]
        assert plan.settings["speculative_algorithm"] in ("UNO", "FROZEN_KV_MTP")
