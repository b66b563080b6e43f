"""`kvgeom boot --step rows`: requests that generate to the context limit, several at once.

run            stack            what it shows
rows-released  none of it       the row write of a tree draft does not fit the request's row
rows-widened   up to req-rows   the row holds it, and the draft's index buffer is too narrow for it
rows-control   all of it        the tokens: one rank, no speculation
rows-tree-*    all of it        a tree of drafts on one rank, at page 1 and 4
rows-chain-*   all of it        a chain of drafts under DCP, at page 1 and 4

Every run is in bounds mode: a write past a row, a pool or a kernel's buffer stops it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgeom.boot_checks import Claim
    from kvgeom.cpu_engine import EngineReport, EngineSpec

STACK = {"rows-released": "", "rows-widened": "req-rows"}  # the PR that it ends with
_SERVED = ("rows-control", "rows-tree-page1", "rows-tree-page4",
            "rows-chain-page1", "rows-chain-page4")  # fmt: skip
RUNS = (*_SERVED, *STACK)
_CONTEXT, _PROMPT = 24, 16
_LOCS = 384  # three requests of up to 128, at pages of up to 32


def specs(tp: int, dcp: int, device: str) -> dict[str, EngineSpec]:
    """The engine of every run: three requests, each as long as the context allows."""
    from kvgeom.cpu_engine import EngineSpec

    prompts = tuple(tuple(3 + (7 * i + 31 * n) % 120 for i in range(_PROMPT)) for n in range(3))
    load = {"prompts": prompts, "max_new_tokens": _CONTEXT - _PROMPT, "max_running": 3}
    every = {**load, "pair": "mqa", "context": _CONTEXT, "bounds": True, "device": device}
    one = {**every, "tp": 1, "dcp": 1, "max_total_tokens": _LOCS}
    tree = {**one, "steps": 5, "topk": 4, "draft_tokens": 8}  # EAGLE3's own for Llama
    chain = {**every, "tp": tp, "dcp": dcp, "max_total_tokens": _LOCS // dcp}
    return {
        "rows-control": EngineSpec(**one, page=1, draft=False),
        "rows-tree-page1": EngineSpec(**tree, page=1),
        "rows-tree-page4": EngineSpec(**tree, page=4),
        "rows-chain-page1": EngineSpec(**chain, page=1),
        "rows-chain-page4": EngineSpec(**chain, page=4),
        "rows-released": EngineSpec(**tree, page=1),
        "rows-widened": EngineSpec(**tree, page=1),
    }


def rows_claim(control: EngineReport, *others: EngineReport) -> Claim:
    """The release overruns the row, the row alone the index buffer; the series serves it all."""
    from kvgeom.boot_checks import Claim, compare, failure

    *served, released, widened = others

    def claim(ok: bool, text: str) -> Claim:
        return Claim("rows", ok, text)

    for name, report, structure in (
        ("the release", released, "req_to_token"),
        ("with the row alone", widened, "kernel"),
    ):
        first = report.violations[0] if report.violations else None
        if first is None or first.structure != structure:
            what = first.message if first else failure(report) or "it served everything"
            return claim(False, f"{name}: no write past a {structure} buffer: {what}")
    for name, report in zip(_SERVED, (control, *served), strict=True):
        if not report.ok:
            return claim(False, f"{name}: {failure(report)}")
        if len(report.idle_ranks) != report.spec.tp:
            passed = f"{len(report.idle_ranks)} of {report.spec.tp} ranks"
            return claim(False, f"{name}: {passed} passed SGLang's idle memory check")
        found = compare(report, control)
        if found.differences:
            return claim(False, f"{name}: not as without speculation: {found.differences[0]}")
    row, buffer = released.violations[0], widened.violations[0]
    return claim(
        True,
        f"to the context limit as without speculation, {sum(map(len, control.outputs))} tokens in "
        f"each of {len(served)} runs; the release writes column {row.end - 1} of {row.limit}, and "
        f"with the row alone element {buffer.index} of {buffer.limit} of the draft's index buffer",
    )
