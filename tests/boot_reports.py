"""Engine reports of the default spec, for the tests of `kvgeom boot`."""

from __future__ import annotations

from dataclasses import replace

from kvgeom.cpu_engine import (
    AllocatorGeometry,
    EngineError,
    EngineReport,
    EngineSpec,
    PoolGeometry,
    RankGeometry,
    ReqToTokenGeometry,
    Violation,
)

SPEC = EngineSpec().resolved()
REFUSAL = "DRAFT_POOL_PAGE_MISMATCH pool=4 allocator=32 reaches=288 valid_to=260"


def rank(number: int = 0, draft_rows: int = 288, width: int = 551) -> RankGeometry:
    return RankGeometry(
        rank=number,
        dcp_rank=number,
        dcp_size=8,
        allocator=AllocatorGeometry("Paged", 256, 32),
        target=PoolGeometry("MHA", 32, 4, 36, "translated", 8),
        draft=PoolGeometry("MHA", 256, draft_rows - 256, draft_rows, "raw", 1),
        req_to_token=ReqToTokenGeometry(5, width, 512),
        draft_shares_allocator=True,
    )


def report(**changes) -> EngineReport:
    """A run of the default spec that went well."""
    changes.setdefault("geometry", [rank(n) for n in range(8)])
    good = EngineReport(
        spec=SPEC,
        release="0.5.23",
        outputs=[[5, 6, 7], [8, 9, 10]],
        logprobs=[[-1.0, -2.0, -3.0], [-0.5, -0.25, -0.125]],
        peak_token_usage=1.0,
        max_req_to_token_end=160,
    )
    return replace(good, **changes)


def stopped(stage: str, kind: str, message: str, **changes) -> EngineReport:
    return report(outputs=[], error=EngineError(stage, kind, message, rank=3), **changes)


def violation(**changes) -> Violation:
    first = Violation(
        rank=1, structure="draft", cls="MHA", index=260, limit=260, loc=260, allocator_page=8,
        message="rank 1: draft pool: write to row 260 of 260",
    )  # fmt: skip
    return replace(first, **changes)
