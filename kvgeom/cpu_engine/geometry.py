"""Reads a rank's page geometry off the live objects of a booted scheduler."""

from __future__ import annotations

from kvgeom.cpu_engine.spec import (
    AllocatorGeometry,
    PoolGeometry,
    RankGeometry,
    ReqToTokenGeometry,
)


def draft_runner(scheduler):
    """The draft's ModelRunner, or None. `draft_worker` wraps a worker that has `draft_runner`."""
    worker = scheduler.draft_worker
    return None if worker is None else worker.draft_worker.draft_runner


def pool_rows(pool) -> int:
    """Physical rows of a KV pool: shape[0] of its first layer's buffer."""
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer
    return buffers[0].shape[0]


def pool_divisor(pool, *, is_draft: bool) -> int:
    """What a loc is divided by before it indexes this pool: 1 where it is indexed raw."""
    from sglang.srt.runtime_context import get_parallel

    if hasattr(pool, "_write_loc_dcp_span"):  # MLA: the pool itself translates
        return pool._write_loc_dcp_span
    return 1 if is_draft else get_parallel().attn_dcp_size  # MHA: the backend does


def _pool(runner, *, is_draft: bool) -> PoolGeometry:
    pool = runner.token_to_kv_pool
    divisor = pool_divisor(pool, is_draft=is_draft)
    return PoolGeometry(
        cls=type(pool).__name__,
        size=pool.size,
        page_size=pool.page_size,
        rows=pool_rows(pool),
        indexed="raw" if divisor == 1 else "translated",
        dcp_size=divisor,
    )


def rank_geometry(scheduler, rank: int) -> RankGeometry:
    """Geometry of this rank; `rank` is its tensor-parallel rank."""
    from sglang.srt.runtime_context import get_parallel

    target = scheduler.tp_worker.model_runner
    draft = draft_runner(scheduler)
    allocator = target.token_to_kv_pool_allocator
    table = target.req_to_token_pool.req_to_token
    parallel = get_parallel()
    return RankGeometry(
        rank=rank,
        dcp_rank=parallel.attn_dcp_rank,
        dcp_size=parallel.attn_dcp_size,
        allocator=AllocatorGeometry(type(allocator).__name__, allocator.size, allocator.page_size),
        target=_pool(target, is_draft=False),
        draft=_pool(draft, is_draft=True) if draft is not None else None,
        req_to_token=ReqToTokenGeometry(*table.shape, target.model_config.context_len),
        draft_shares_allocator=draft is not None and draft.token_to_kv_pool_allocator is allocator,
    )
