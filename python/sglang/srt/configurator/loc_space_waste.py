"""Boot warning: a KV pool holds rows that are never written.

    rows     [0, loc_rows)
    reached  [0, ceil(reach / locs_per_row))   the rest is memory for nothing

O(1): reads integers, allocates nothing, touches no device.
"""

from __future__ import annotations

import logging

from sglang.srt.configurator.page_geometry_check import indexed_pools, locs_per_row
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import GB, KVCache
from sglang.srt.mem_cache.page_geometry import LocSpace
from sglang.srt.utils.common import ceil_div

logger = logging.getLogger(__name__)


def warn_loc_space_waste(
    *, allocator: BaseTokenToKVPoolAllocator, pool: KVCache, is_draft_worker: bool
) -> None:
    """Log each pool of `pool` that is over a page larger than its locs reach."""
    for side, space in indexed_pools(allocator, pool, is_draft_worker):
        reached = _reached_rows(side, space, is_draft_worker)
        unreached = side.loc_rows - reached
        # A view into a shared buffer holds no memory of its own.
        if unreached <= side.loc_rows - side.size or not side.mem_usage:
            continue
        logger.warning(
            "LOC_SPACE_WASTE pool=%s rows=%d reached=%d bytes=%d",
            "draft" if is_draft_worker else "target",
            side.loc_rows,
            reached,
            round(side.mem_usage * GB * unreached / side.loc_rows),
        )


def _reached_rows(pool: KVCache, space: LocSpace, is_draft_worker: bool) -> int:
    per_row = pool.locs_per_row if is_draft_worker else locs_per_row(pool, space)
    return ceil_div(space.reach, per_row)
