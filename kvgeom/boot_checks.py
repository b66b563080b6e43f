"""What the engine reports of `kvgeom boot` come to: the table, the comparison, the four claims.

Pure: from reports to results.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvgeom.cpu_engine import EngineReport, RankGeometry
from kvgeom.cpu_engine.spec import AllocatorGeometry, PoolGeometry, ReqToTokenGeometry

if TYPE_CHECKING:
    from kvgeom.deployment.spec import Pool

REQ_TO_TOKEN = "req_to_token"
LOGPROB_TOLERANCE = 1e-4
FULL = 0.97  # of SGLang's own peak token usage
_MISMATCH = re.compile(
    r"DRAFT_POOL_PAGE_MISMATCH pool=(\d+) allocator=(\d+) reaches=(\d+) valid_to=(\d+)"
)


@dataclass(frozen=True)
class Claim:
    """One line of the summary."""

    step: str
    ok: bool
    text: str


@dataclass(frozen=True)
class Row:
    """One structure. `reach`: the first index that is never used; `rows` have to reach up to it."""

    structure: str
    size: int
    page: int | None
    rows: int | None
    index: str
    reach: int
    covers: bool | None


def table(rank: RankGeometry, furthest_column: int) -> list[Row]:
    """The structures of one rank. `furthest_column`: the end of the longest req_to_token write."""
    first = allocator_row(rank.allocator)
    pools = [
        pool_row(name, pool, "loc", pool.dcp_size, -(-first.reach // pool.dcp_size))
        for name, pool in (("target pool", rank.target), ("draft pool", rank.draft))
        if pool is not None
    ]
    return [first, *pools, request_row(rank.req_to_token, furthest_column)]


def allocator_row(allocator: AllocatorGeometry) -> Row:
    """The loc space; nothing indexes it."""
    reach = allocator.size + allocator.page_size
    return Row("allocator", allocator.size, allocator.page_size, None, "", reach, None)


def pool_row(name: str, pool: PoolGeometry | Pool, ids: str, ids_per_row: int, reach: int) -> Row:
    """A pool that `ids` index, so many of them a row, up to the row `reach`."""
    index = f"translated ({ids} // {ids_per_row})" if ids_per_row > 1 else f"raw ({ids})"
    return Row(name, pool.size, pool.page_size, pool.rows, index, reach, pool.rows >= reach)


def request_row(requests: ReqToTokenGeometry, end: int) -> Row:
    """A request's row, with columns up to `end` written."""
    covers = requests.width >= end
    return Row(REQ_TO_TOKEN, requests.context_len, None, requests.width, "position", end, covers)


def rank_differences(ranks: list[RankGeometry]) -> list[str]:
    """Every figure in which a rank differs from what most ranks have."""
    flat = {r.rank: _flat({**asdict(r), "rank": None, "dcp_rank": None}) for r in ranks}
    if not flat:
        return []
    usual = dict(Counter(tuple(f.items()) for f in flat.values()).most_common(1)[0][0])
    return [
        f"rank {rank}: {name} is {figures.get(name)}, elsewhere {usual.get(name)}"
        for rank, figures in flat.items()
        for name in {**usual, **figures}
        if figures.get(name) != usual.get(name)
    ]


def _flat(value: dict, prefix: str = "") -> dict:
    out = {}
    for name, item in value.items():
        out |= _flat(item, f"{prefix}{name}.") if isinstance(item, dict) else {prefix + name: item}
    return out


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same requests. `differences` has one line per request that differs."""

    tokens: int
    max_logprob_difference: float
    differences: list[str]


def compare(mine: EngineReport, control: EngineReport) -> Comparison:
    """Every output token and every logprob of both runs."""
    differences, largest = [], 0.0
    if len(mine.outputs) != len(control.outputs):
        differences.append(f"{len(mine.outputs)} requests answered, {len(control.outputs)} there")
    for n, (a, b) in enumerate(zip(mine.outputs, control.outputs, strict=False)):
        pa, pb = mine.logprobs[n], control.logprobs[n]
        gaps = [abs(x - y) for x, y in zip(pa, pb, strict=False)]
        # NaN is larger than any tolerance.
        wide = [i for i, gap in enumerate(gaps) if not gap <= LOGPROB_TOLERANCE]
        largest = max([largest, *gaps], key=lambda gap: (gap != gap, gap))
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            where = f"{len(a)} tokens, {len(b)} there" if at is None else (
                f"token {at} is {a[at]}, {b[at]} there"
            )  # fmt: skip
            differences.append(f"request {n}: {where}")
        elif len(pa) != len(a) or len(pb) != len(b):
            differences.append(f"request {n}: {len(pa)} and {len(pb)} logprobs of {len(a)} tokens")
        elif wide:
            at = wide[0]
            differences.append(f"request {n}: logprob {at} is {pa[at]:.6f}, {pb[at]:.6f} there")
    return Comparison(sum(map(len, mine.outputs)), largest, differences)


def failure(report: EngineReport) -> str:
    """Why a run did not end well, in a line; "" where it did."""
    if report.error is None:
        return report.violations[0].message if report.violations else ""
    error = report.error
    rank = "" if error.rank is None else f" on rank {error.rank}"
    doing = "starting" if error.stage == "boot" else "serving"
    first_line = (error.message.strip().splitlines() or ["no message"])[0]
    return f"the engine stopped while {doing}{rank}: {error.type}: {first_line}"


def geometry_claim(patched: EngineReport) -> Claim:
    """The engine booted, all ranks agree, and every structure covers what indexes it."""

    def claim(ok: bool, text: str) -> Claim:
        return Claim("geometry", ok, text)

    ranks, tp = patched.geometry, patched.spec.tp
    if len(ranks) != tp:
        return claim(False, failure(patched) or f"{len(ranks)} of {tp} ranks reported")
    different = rank_differences(ranks)
    if different:
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        return claim(False, different[0] + more)
    short = [r for r in table(ranks[0], patched.max_req_to_token_end) if r.covers is False]
    if short:
        row = short[0]
        return claim(False, f"{row.structure} has {row.rows} rows and is used up to {row.reach}")
    return claim(True, f"every pool covers the allocator's reach, alike on {tp} ranks")


def serve_claim(patched: EngineReport, control: EngineReport) -> Claim:
    """Served without an error up to a full cache, with the tokens and logprobs of the control."""

    def claim(ok: bool, text: str) -> Claim:
        return Claim("serve", ok, text)

    for report, name in ((patched, ""), (control, "control: ")):
        if not report.ok:
            return claim(False, name + failure(report))
    if patched.peak_token_usage < FULL:
        return claim(False, f"peak token usage {patched.peak_token_usage:.3f}, wanted {FULL}")
    found = compare(patched, control)
    if found.differences:
        return claim(False, f"not as the tp 1 control: {found.differences[0]}")
    if not found.tokens:
        return claim(False, "no tokens came back")
    return claim(
        True,
        f"token usage up to {patched.peak_token_usage:.3f}; {found.tokens} tokens as the tp 1 "
        f"control, logprobs within {found.max_logprob_difference:.1e}",
    )


def mismatch(report: EngineReport) -> dict[str, int] | None:
    """The numbers of the refusal, None where the engine did not refuse."""
    error = report.error
    if error is None or (error.stage, error.type) != ("boot", "PageGeometryError"):
        return None
    found = _MISMATCH.fullmatch(error.message.strip())
    return found and dict(
        zip(("pool", "allocator", "reaches", "valid_to"), map(int, found.groups()), strict=True)
    )


def refuse_claim(report: EngineReport) -> Claim:
    """With the scheduled page as the draft's page, the engine refuses to start and says why."""
    numbers, spec = mismatch(report), report.spec
    if numbers is None:
        what = failure(report) or "the engine started and served"
        return Claim("refuse", False, f"no DRAFT_POOL_PAGE_MISMATCH: {what}")
    right = (
        numbers["pool"] == spec.page
        and numbers["allocator"] == spec.page * spec.dcp
        and numbers["valid_to"] < numbers["reaches"]
    )
    if not right:
        return Claim("refuse", False, f"refused, with other numbers: {report.error.message}")
    return Claim("refuse", True, f"with the scheduled page as draft page: {report.error.message}")


def overrun_claim(report: EngineReport) -> Claim:
    """Without the assertion the draft writes rows past its pool's end, in the last page."""
    drafts = [v for v in report.violations if v.structure == "draft"]
    others = [v for v in report.violations if v.structure != "draft"]
    if others or not drafts:
        what = others[0].message if others else failure(report) or "the engine served everything"
        return Claim("overrun", False, f"no write past the draft pool's end: {what}")
    first, spec = drafts[0], report.spec
    last_page = spec.max_total_tokens // spec.page
    right = first.limit <= first.index and first.allocator_page == last_page
    text = (
        f"without the assertion the draft writes row {first.index} of {first.limit}, in the last "
        f"allocator page ({first.allocator_page} of {last_page})"
    )
    return Claim("overrun", right, text)
