"""What a plan comes to: its structures in a table, the spans to draw, the verdict in one line.

Pure: from one tree's answer to results.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvgeom import boot_checks
from kvgeom.boot_checks import Row
from kvgeom.deployment.spec import TreePlan

TARGET, DRAFT, ROW = "target pool", "draft pool", "req_to_token"


class Word(StrEnum):
    SAFE = "safe"
    UNSAFE = "unsafe"
    REFUSED = "refused"


@dataclass(frozen=True)
class Verdict:
    """One line, without the word that it begins with."""

    word: Word
    text: str

    def __str__(self) -> str:
        return f"{self.word}: {self.text}"


@dataclass(frozen=True)
class Span:
    """The last indices that reach a structure, [start, end), of which it has those below
    `valid_to`. Locs for a draft, rows for a target, columns for req_to_token."""

    name: str
    start: int
    end: int
    valid_to: int

    @property
    def missing(self) -> int:
        return max(0, self.end - self.valid_to)


def rows(plan: TreePlan) -> list[Row]:
    """The allocator, and every structure that a loc or a position indexes."""
    if plan.geometry is None:
        return []
    made = boot_checks.table(plan.geometry, plan.row_use.ends_at)
    context, page = plan.geometry.req_to_token.context_len, plan.settings["page_size"]
    for table in plan.tables:
        covers = table.columns >= table.ends_at
        made.append(
            Row(table.name, context, page, table.columns, "position", table.ends_at, covers)
        )
    return made


def spans(plan: TreePlan) -> list[Span]:
    """The last allocator page against each pool's rows, then the end of a row."""
    if plan.geometry is None:
        return []
    rank, made = plan.geometry, []
    allocator = rank.allocator
    for row in rows(plan)[1:]:
        if row.structure == ROW:
            start = min(rank.req_to_token.context_len, row.rows, plan.row_use.committed)
            made.append(Span("req_to_token row", start, max(row.reach, row.rows), row.rows))
        elif row.structure in (TARGET, DRAFT):
            pool = rank.draft if row.structure == DRAFT else rank.target
            page = -(-allocator.page_size // pool.dcp_size)
            made.append(Span(row.structure, row.reach - page, row.reach, row.rows))
    return made


def headroom(plan: TreePlan) -> str:
    """What a row's width is made of, and what a decode step needs of it."""
    table, use, page = plan.geometry.req_to_token, plan.row_use, plan.geometry.allocator.page_size
    made = f"row {table.width} = context {table.context_len} + {table.width - table.context_len}"
    if plan.settings["speculative_algorithm"] is None:
        return f"{made}; without speculation a request ends at its context length"
    return (
        f"{made}; a decode step ends at {use.ends_at}: {use.committed} committed + reserve "
        f"{use.reserve}, in whole pages of {page}"
    )


def verdict(plan: TreePlan) -> Verdict:
    """Unsafe where a structure lacks an index that reaches it; the first one is named."""
    if plan.stop is not None:
        who = "by the boot assertion" if plan.stop.by == "assertion" else "by SGLang"
        return Verdict(Word.REFUSED, f"{who}: {plan.stop.message}")
    short = [row for row in rows(plan) if row.covers is False]
    if not short:
        told = "every pool, row and table that was built covers what indexes it"
        if plan.not_planned:
            told += f"; not looked at: {', '.join(plan.not_planned)}"
        return Verdict(Word.SAFE, told)
    more = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
    faults = {ROW: _row_fault, TARGET: _pool_fault, DRAFT: _pool_fault}
    say = faults.get(short[0].structure, _table_fault)
    return Verdict(Word.UNSAFE, say(plan, short[0]) + more)


def _pool_fault(plan: TreePlan, row: Row) -> str:
    allocator = plan.geometry.allocator
    pool = plan.geometry.draft if row.structure == DRAFT else plan.geometry.target
    # The lowest page is never handed out.
    usage = max(0, row.rows * pool.dcp_size - allocator.page_size) / allocator.size
    return (
        f"the {row.structure} has {row.rows} rows and is indexed up to {row.reach}: above "
        f"{usage:.2%} token usage KV goes to rows that do not exist; an illegal memory access, or "
        f"wrong output near full occupancy"
    )


def _row_fault(plan: TreePlan, row: Row) -> str:
    context = plan.geometry.req_to_token.context_len
    return (
        f"a decode step writes {row.reach - row.rows} columns past a request's req_to_token row, "
        f"into another request's: from {plan.row_use.overruns_from} of {context} tokens on; that "
        f"request's output goes wrong, and KV slots are lost"
    )


def _table_fault(plan: TreePlan, row: Row) -> str:
    return (
        f"the {row.structure} holds {row.rows} tokens of a request, and its longest sequence has "
        f"{row.reach}: within {row.reach - row.rows} tokens of that end, near the context length "
        f"of {row.size}, attention reads the wrong KV or the server stops"
    )
