"""A DSPARK draft on the CPU engine, alone and with HiCache: the algorithm that HiCache admits
under decode context parallelism.

Its numerics are right under Triton's interpreter, so tokens, drafted blocks and cache bytes are
compared. Tokens alone would not do: the target verifies whatever is drafted, so a draft that reads
another request's rows still ends in the right tokens, as `draft-load-back` shows.
"""

from __future__ import annotations

import pytest
from engine_fixtures import report_of

from kvgeom.cpu_engine import EngineReport, EngineSpec

pytestmark = pytest.mark.engine

LOCS = 1536  # six pages of 256; a prompt keeps two of them


def prompt(number: int) -> tuple[int, ...]:
    return tuple(3 + (7 * i + i // 120 * (5 + number) + 31 * number) % 120 for i in range(560))


PROMPTS = tuple(prompt(number) for number in (0, 1, 2, 3, 0))


@pytest.fixture(scope="module")
def report(released_engines):
    def run(tp: int, **rest) -> EngineReport:
        """PROMPTS one after the other on a loc space that holds two and a part of the next."""
        spec = EngineSpec(
            pair="mla", tp=tp, dcp=tp, algorithm="DSPARK", max_total_tokens=LOCS // tp,
            prompts=PROMPTS, max_new_tokens=4, in_turn=True, **rest,
        )  # fmt: skip
        return report_of(released_engines, spec)

    return run


@pytest.fixture(scope="module")
def cached(report) -> EngineReport:
    """TP8 x DCP8 with HiCache, every write checked before it is made."""
    return report(8, hicache=True, bounds=True)


def assert_same_output(one: EngineReport, other: EngineReport) -> None:
    assert one.ok and other.ok, (one.error, one.violations, other.error, other.violations)
    assert one.outputs == other.outputs and all(one.outputs)
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        assert left == pytest.approx(right, abs=1e-4)


def rounds(output: list[int], blocks: list[list[int]]) -> int:
    """Rounds to commit `output` when each takes what its block has right and one token more."""
    at, used = 1, 0  # the first token is the prefill's
    while at < len(output):
        right = [a == b for a, b in zip(output[at:], blocks[used], strict=False)] + [False]
        at, used = at + right.index(False) + 1, used + 1
    return used


@pytest.mark.parametrize("tp", [1, 8])
def test_tokens_are_the_targets_own(report, cached, tp):
    drafted, alone = report(1) if tp == 1 else cached, report(1, draft=False)
    assert_same_output(drafted, alone)
    for output, blocks, accepted in zip(
        drafted.outputs, drafted.drafted, drafted.accept_lengths, strict=True
    ):
        assert {len(block) for block in blocks} == {3}
        assert rounds(output, blocks) == len(blocks)
        assert accepted == pytest.approx(len(output) / len(blocks))
    assert min(len(blocks) for blocks in drafted.drafted) == 2  # a drafted token was right
    assert alone.drafted == [[]] * 5 and alone.accept_lengths == [0.0] * 5


def test_the_draft_pool_spans_the_allocator_to_its_last_page(released_engines):
    """Two requests at once on 3 pages of 256; decoding takes the first into the last page."""
    drafted = report_of(released_engines, EngineSpec(pair="mla", algorithm="DSPARK"))
    alone = report_of(released_engines, EngineSpec(pair="mla", tp=1, dcp=1, draft=False))
    assert_same_output(drafted, alone)
    assert drafted.peak_token_usage == 1.0 and drafted.idle_ranks == [*range(8)]
    for rank in drafted.geometry:
        allocator, draft = rank.allocator, rank.draft
        assert (allocator.size, allocator.page_size) == (768, 256)
        assert (draft.rows, draft.page_size, draft.indexed) == (1024, 256, "raw")
        assert rank.draft_shares_allocator and rank.target.rows == 128


def test_what_is_drafted_depends_neither_on_dcp_nor_on_hicache(report, cached):
    assert cached.drafted == report(1).drafted


def test_evicted_rows_of_the_draft_come_back_from_the_host(cached):
    assert cached.ok, cached.error
    assert cached.cached_tokens == [0, 0, 0, 0, 512]
    # Rows on rank 0: an eighth in both layers of the target; all of them in the draft's K and V.
    assert cached.host_rows["target back"] == 2 * 512 // 8
    assert cached.host_rows["draft back"] == 2 * 512
    assert cached.host_rows["draft out"] == 8 * cached.host_rows["target out"] > 0
    # The bytes of the draft's cache, what it drafts from them, and what the target takes of it.
    assert cached.draft_rows[4] == cached.draft_rows[0]
    assert all(len(set(digests)) == 8 for digests in cached.draft_rows)
    assert len({digests[0] for digests in cached.draft_rows}) == 4
    assert cached.drafted[4] == cached.drafted[0]
    assert cached.accept_lengths[4] == cached.accept_lengths[0]
    assert cached.idle_ranks == [*range(8)]


def test_the_drafts_host_pool_spans_the_loc_space(cached):
    assert len(cached.geometry) == 8
    for rank in cached.geometry:
        host, draft = rank.host, rank.draft_host
        assert host.logical_size == 8 * host.size > rank.allocator.size
        assert draft.size >= host.logical_size and draft.page_size == rank.allocator.page_size


def test_rows_that_stay_on_the_host_are_seen(report):
    """Without the draft's load-back the repeated request drafts from another prompt's rows."""
    stale = report(1, hicache=True, faults=("draft-load-back",))
    assert stale.ok, stale.error
    assert "draft back" not in stale.host_rows and stale.host_rows["target back"] > 0
    assert stale.outputs[4] == stale.outputs[0]
    assert stale.draft_rows[4] != stale.draft_rows[0]
    assert stale.drafted[4] != stale.drafted[0]


def test_a_host_pool_of_the_ranks_own_rows_is_overrun(report):
    short = report(2, hicache=True, bounds=True, faults=("draft-host-pool",))
    assert len(short.geometry) == 2
    for rank in short.geometry:
        assert rank.draft_host.size == 1600 < rank.host.logical_size == 3136
    # The host indices of the fourth prompt are 1536 to 2047.
    assert short.violations
    for violation in short.violations:
        assert (violation.structure, violation.cls) == ("draft host", "MHATokenToKVPoolHost")
        assert (violation.index, violation.limit) == (1600, 1600)
        assert "draft host pool: row 1600 of 1600" in violation.message
    assert short.error.type == "OutOfBoundsWrite"
