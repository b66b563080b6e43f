"""Boot assertion: a req_to_token row holds what its allocator can give a request."""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_max_alloc_len_per_req,
)
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.page_geometry import PageGeometryError


def check_req_to_token_rows(
    *,
    allocator: BaseTokenToKVPoolAllocator,
    req_to_token_pool: ReqToTokenPool,
    context_len: int,
) -> None:
    """PageGeometryError unless each row has a column for every position written.

    `context_len` is the model's; the page is read from the built `allocator`.
    """
    page_size = get_alloc_page_size(allocator)
    reaches = get_max_alloc_len_per_req(context_len=context_len, page_size=page_size)
    row_width = req_to_token_pool.req_to_token.shape[1]
    if row_width >= reaches:
        return
    raise PageGeometryError(
        f"REQ_TO_TOKEN_ROW_MISMATCH row={row_width} page={page_size} reaches={reaches}"
    )
