"""Reads a rank's page geometry off the live objects of a booted scheduler."""

from __future__ import annotations

from kvgeom.cpu_engine.spec import (
    AllocatorGeometry,
    HostPoolGeometry,
    PoolGeometry,
    RankGeometry,
    ReqToTokenGeometry,
)


def draft_runner(scheduler):
    """The draft's ModelRunner, or None. `draft_worker` wraps a worker that has `draft_runner`."""
    worker = scheduler.draft_worker
    return None if worker is None else worker.draft_worker.draft_runner


def pool_buffers(pool) -> list:
    """One tensor a layer, or two: K and V."""
    return pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def pool_rows(pool) -> int:
    """Physical rows of a KV pool: shape[0] of its first layer's buffer."""
    return pool_buffers(pool)[0].shape[0]


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


def host_pools(scheduler) -> dict:
    """The host pools of HiCache by name; empty without it."""
    from sglang.srt.runtime_context import get_memory

    if not get_memory().enable_hierarchical_cache:
        return {}
    entries = scheduler.tree_cache.cache_controller.mem_pool_host.entry_map
    return {name.value: entry.host_pool for name, entry in entries.items()}


def _host(pool) -> HostPoolGeometry | None:
    if pool is None:
        return None
    return HostPoolGeometry(size=pool.size, logical_size=pool.logical_size,
                            page_size=pool.page_size)  # fmt: skip


def rank_geometry(scheduler, rank: int) -> RankGeometry:
    """Geometry of this rank; `rank` is its tensor-parallel rank."""
    from sglang.srt.runtime_context import get_parallel

    target = scheduler.tp_worker.model_runner
    draft = draft_runner(scheduler)
    allocator = target.token_to_kv_pool_allocator
    table = target.req_to_token_pool.req_to_token
    parallel, hosts = get_parallel(), host_pools(scheduler)
    return RankGeometry(
        rank=rank,
        dcp_rank=parallel.attn_dcp_rank,
        dcp_size=parallel.attn_dcp_size,
        allocator=AllocatorGeometry(type(allocator).__name__, allocator.size, allocator.page_size),
        target=_pool(target, is_draft=False),
        draft=_pool(draft, is_draft=True) if draft is not None else None,
        req_to_token=ReqToTokenGeometry(*table.shape, target.model_config.context_len),
        draft_shares_allocator=draft is not None and draft.token_to_kv_pool_allocator is allocator,
        host=_host(hosts.get("kv")),
        draft_host=_host(hosts.get("draft")),
    )
