"""What `kvgeom plan` prints: the verdict first, then the structures and the last page."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from kvgeom import __version__
from kvgeom.boot_checks import Row
from kvgeom.deployment.spec import Request, TreePlan
from kvgeom.deployment.verdict import Span, Verdict, headroom, rows, spans, verdict

_BAR = 48  # characters
_STYLES = {"safe": "bold green", "unsafe": "bold red"}


def show(out: Console, request: Request, installed: TreePlan, with_series: TreePlan) -> None:
    """Everything, the verdict on the installed release first."""
    _show_verdict(out, "", verdict(installed))
    _show_verdict(out, "with the series: ", verdict(with_series))
    if installed.tokens and with_series.tokens and with_series.tokens < installed.tokens:
        _line(
            out,
            f"over-committed: {installed.tokens} KV tokens per GPU as it is; with the series, "
            f"which charges all that the pools take, {with_series.tokens}",
        )
    for name, plan in (("as it is", installed), ("with the series", with_series)):
        if plan.geometry is None:
            continue
        _line(out, "")
        if name != "as it is" and _same(plan, installed):
            _line(out, "With the series every figure is the same.")
            continue
        _line(out, f"SGLang {plan.release} {name}: {settings_line(plan)}")
        _show_structures(out, plan)
        _line(out, headroom(plan))
        _line(out, tokens_line(request, plan))
        for line in unused(plan):
            _line(out, line)
        for line in diagram(spans(plan)):
            _line(out, line)
    if verdict(installed).word == "unsafe" and installed.not_planned:
        _line(out, f"Not looked at: {', '.join(installed.not_planned)}.")


def _same(plan: TreePlan, other: TreePlan) -> bool:
    return (plan.geometry, plan.row_use, plan.tokens) == (
        other.geometry,
        other.row_use,
        other.tokens,
    )


def _show_verdict(out: Console, prefix: str, found: Verdict) -> None:
    out.print(prefix, end="", style="dim")
    out.print(f"{found.word}:", end=" ", style=_STYLES.get(found.word, "bold yellow"))
    out.print(found.text, markup=False, soft_wrap=True)


def _line(out: Console, text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)


def settings_line(plan: TreePlan) -> str:
    """The resolved arguments that the geometry follows from."""
    s, allocator = plan.settings, plan.geometry.allocator
    backends = {s["prefill_attention_backend"], s["decode_attention_backend"]}
    parts = [
        f"tp {s['tp_size']}, dcp {s['dcp_size']}",
        f"scheduled page {s['page_size']}, allocator page {allocator.page_size}",
        f"locs [{allocator.page_size}, {allocator.size + allocator.page_size})",
        f"attention {'/'.join(sorted(map(str, backends)))}",
    ]
    if s["speculative_algorithm"] is not None:
        shape = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        parts.append(f"{s['speculative_algorithm']} {'/'.join(str(s[name]) for name in shape)}")
    return ", ".join(parts)


def tokens_line(request: Request, plan: TreePlan) -> str:
    """SGLang's own capacity, and from which memory."""
    counted = f"{request.weights:g} GiB of weights" if request.weights else (
        "no weights counted, so at most that: --weights GIB"
    )  # fmt: skip
    return (
        f"KV tokens per GPU: {plan.tokens} ({request.gpu_memory:g} GiB, {counted}; "
        f"mem_fraction_static {plan.settings['mem_fraction_static']})"
    )


def unused(plan: TreePlan) -> list[str]:
    """Pools with more than a page of rows that no id reaches."""
    return [
        f"memory for nothing: {pool.rows - pool.reach} of the {pool.rows} rows of the {pool.name} "
        f"are never indexed"
        for pool in plan.geometry.pools
        if pool.rows - pool.reach > pool.page_size
    ]


def _show_structures(out: Console, plan: TreePlan) -> None:
    shown = Table("", "size", "page", "rows", "indexed by", "reach", "covers", pad_edge=False)
    for row in rows(plan):
        shown.add_row(*_cells(row))
    out.print(shown)


def _cells(row: Row) -> list[str]:
    covers = {True: "yes", False: "NO", None: ""}[row.covers]
    numbers = ["" if n is None else str(n) for n in (row.size, row.page, row.rows)]
    return [row.structure, *numbers, row.index, str(row.reach), covers]


def diagram(found: list[Span]) -> list[str]:
    """A bar a span: `=` exists, `x` does not."""
    width = max((len(span.name) for span in found), default=0)
    lines = []
    for span in found:
        have = max(0, min(span.valid_to, span.end) - span.start)
        filled = min(_BAR - (span.missing > 0), round(_BAR * have / (span.end - span.start)))
        bar = "=" * filled + "x" * (_BAR - filled)
        rest = f"{span.missing} of them missing" if span.missing else "all there"
        lines.append(f"  {span.name:{width}}  [{span.start} {bar} {span.end})  {rest}")
    return ["The last allocator page and the end of a row (= exists, x does not):", *lines]


def as_dict(request: Request, installed: TreePlan, with_series: TreePlan, package: str) -> dict:
    """What `--json` prints."""

    def tree(plan: TreePlan) -> dict:
        found = verdict(plan)
        return {
            "verdict": str(found.word),
            "text": found.text,
            "structures": [asdict(row) for row in rows(plan)],
            **asdict(plan),
        }

    return {
        "kvgeom": __version__,
        "tree": package,
        "request": asdict(request),
        "verdict": str(verdict(installed).word),
        "installed": tree(installed),
        "with_series": tree(with_series),
    }
