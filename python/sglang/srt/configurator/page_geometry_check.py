"""Boot assertion: every KV pool has a row for each loc that indexes it.

    allocator page   [reach - allocator page, reach)   the last page handed out
    pool rows        [0, valid_to)                     must contain it

O(1): reads shapes and integers, allocates nothing, touches no device.
"""

from __future__ import annotations

from typing import Iterator

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache
from sglang.srt.mem_cache.page_geometry import LocSpace, PageGeometryError
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel


def check_page_geometry(
    *,
    allocator: BaseTokenToKVPoolAllocator,
    pool: KVCache,
    is_draft_worker: bool,
    is_indexed: bool = True,
) -> None:
    """PageGeometryError unless `pool` covers the locs of `allocator`.

    `is_indexed` is False for a placeholder pool that no loc ever indexes.
    """
    if not is_indexed:
        return
    for side, space in indexed_pools(allocator, pool, is_draft_worker):
        _check_covers(side, space, is_draft_worker)


def indexed_pools(
    allocator: BaseTokenToKVPoolAllocator, pool: KVCache, is_draft_worker: bool
) -> Iterator[tuple[KVCache, LocSpace]]:
    """Each pool that holds KV rows, with the space of the ids that index it."""
    if isinstance(pool, DeepSeekV4TokenToKVPool):
        # Compressed rows and windows: no pool of it holds one row per loc.
        return
    if not isinstance(pool, SWAKVPool):
        side = pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool
        yield side, _space(allocator, side, is_draft_worker)
        return
    if pool.full_layer_nums:
        side = pool.full_kv_pool
        yield side, _space(allocator, side, is_draft_worker)
    if not pool.swa_layer_nums or not isinstance(allocator, SWATokenToKVPoolAllocator):
        return
    if pool.swa_uses_full_indices:
        yield pool.swa_kv_pool, allocator.loc_space
    elif not allocator.swa_req_ring:
        yield pool.swa_kv_pool, allocator.swa_attn_allocator.row_space


def _space(
    allocator: BaseTokenToKVPoolAllocator, pool: KVCache, is_draft_worker: bool
) -> LocSpace:
    # A replicated draft is indexed by raw locs, unless its rows live inside the
    # target's buffer or are sharded exactly as the target's.
    raw = is_draft_worker and not pool.shares_target_rows
    return allocator.loc_space if raw else allocator.row_space


def locs_per_row(pool: KVCache, space: LocSpace) -> int:
    """How many locs share a row of a target's pool: it stores every dcp_size-th loc
    of a widened space."""
    dcp_size = get_parallel().attn_dcp_size
    widened = space.page_size == (pool.loc_rows - pool.size) * dcp_size
    return dcp_size if widened else 1


def _check_covers(pool: KVCache, space: LocSpace, is_draft_worker: bool) -> None:
    pool_page = pool.loc_rows - pool.size
    ids_per_row = 1 if is_draft_worker else locs_per_row(pool, space)
    valid_to = pool.loc_rows * ids_per_row
    if valid_to >= space.reach and pool_page * ids_per_row == space.page_size:
        return
    code = "DRAFT" if is_draft_worker else "TARGET"
    raise PageGeometryError(
        f"{code}_POOL_PAGE_MISMATCH pool={pool_page} allocator={space.page_size} "
        f"reaches={space.reach} valid_to={valid_to}"
    )
