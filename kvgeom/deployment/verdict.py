"""What a plan comes to: its structures in a table, the spans to draw, the verdict in one line.

Pure: from one tree's answer to results.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvgeom.boot_checks import REQ_TO_TOKEN, Row, allocator_row, pool_row, request_row
from kvgeom.deployment.spec import HOST_SLOT, Pool, TreePlan


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
    built, page = plan.geometry, plan.settings["page_size"]
    context = built.req_to_token.context_len
    made = [allocator_row(built.allocator)]
    made += [pool_row(p.name, p, p.ids, p.ids_per_row, p.reach) for p in built.pools]
    made.append(request_row(built.req_to_token, plan.row_use.ends_at))
    for table in plan.tables:
        covers = table.columns >= table.ends_at
        made.append(
            Row(table.name, context, page, table.columns, "position", table.ends_at, covers)
        )
    return made


def spans(plan: TreePlan) -> list[Span]:
    """The last page of ids against the rows that it indexes, then the end of a row."""
    if plan.geometry is None:
        return []
    made = []
    for pool in plan.geometry.pools:
        page = -(-pool.space_page // pool.ids_per_row)
        made.append(Span(pool.name, pool.reach - page, pool.reach, pool.rows))
    width, end = plan.geometry.req_to_token.width, plan.row_use.ends_at
    start = min(plan.geometry.req_to_token.context_len, width, plan.row_use.committed)
    return [*made, Span("req_to_token row", start, max(end, width), width)]


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
    return Verdict(Word.UNSAFE, _fault(plan, short[0]) + more)


def _fault(plan: TreePlan, row: Row) -> str:
    pool = plan.geometry.pool(row.structure)
    if pool is not None:
        return _pool_fault(pool)
    return (_row_fault if row.structure == REQ_TO_TOKEN else _table_fault)(plan, row)


def _pool_fault(pool: Pool) -> str:
    # The lowest page is never handed out.
    usage = max(0, pool.rows * pool.ids_per_row - pool.space_page) / pool.space
    why = f" ({pool.why})" if pool.why else ""
    have = f"the {pool.name} has {pool.rows} rows and is indexed up to {pool.reach}{why}: above"
    if pool.ids == HOST_SLOT:
        return (
            f"{have} {usage:.2%} of the host slots KV is copied past its end; wrong output after a "
            f"prefix was evicted and loaded back"
        )
    return (
        f"{have} {usage:.2%} token usage KV goes to rows that do not exist; an illegal memory "
        f"access, or wrong output near full occupancy"
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
