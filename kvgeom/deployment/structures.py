"""What a loc indexes on one GPU, read from the real pools and allocators: in the child.

loc --> a target's pool, // dcp_size where the pool or the attention backend translates
    --> a draft's pool, as it is
    --> window id or device id, by the allocator's own table --> the pool of that name
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

from kvgeom.cpu_engine.spec import AllocatorGeometry, ReqToTokenGeometry
from kvgeom.deployment.arguments import Stopped
from kvgeom.deployment.spec import Geometry, Pool

# The CUDA backend whose KV write divides a loc by the DCP factor, for pools that do not (MHA).
DIVIDES = "triton"
_PLAIN = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
_WINDOWS = ("SWATokenToKVPoolAllocator", "PureSWATokenToKVPoolAllocator")
_HISPARSE = "HiSparseTokenToKVPoolAllocator"


def geometry(target: SimpleNamespace, drafts: list[SimpleNamespace]) -> Geometry:
    """Of the runners of a target and of its draft.

    Stopped where an allocator hands out ids in a way that is not known here.
    """
    from sglang.srt.runtime_context import get_parallel

    allocator = target.token_to_kv_pool_allocator
    ids = _ids(allocator)
    pools = list(_pools("target", target, ids, is_draft=False))
    for n, draft in enumerate(drafts, start=1):
        name = "draft" if len(drafts) == 1 else f"draft {n}"
        pools += _pools(name, draft, ids, is_draft=True)
    shares = [draft.token_to_kv_pool_allocator is allocator for draft in drafts]
    table = target.req_to_token_pool.req_to_token
    cls, loc = type(allocator).__name__, ids["loc"]
    return Geometry(
        dcp_size=get_parallel().attn_dcp_size,
        allocator=AllocatorGeometry(cls, loc.size, loc.page_size),
        pools=[*pools, *_tables(allocator, loc)],
        req_to_token=ReqToTokenGeometry(*table.shape, target.model_config.context_len),
        draft_shares_allocator=all(shares) if drafts else None,
    )


def _ids(allocator) -> dict[str, SimpleNamespace]:
    """The allocator of each kind of id, with `size` and `page_size`."""
    cls = type(allocator).__name__
    if cls in _PLAIN:
        return {"loc": allocator}
    if cls in _WINDOWS:
        full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
        return {"loc": full, "window id": window}
    if cls == _HISPARSE:
        logical, device = allocator.logical_attn_allocator, allocator.hisparse_attn_allocator
        return {"loc": logical, "device id": device}
    raise Stopped("kvgeom", f"a plan does not cover the locs of SGLang's {cls}")


def _tables(allocator, loc) -> Iterator[Pool]:
    """The allocator's tables from a loc to another id; their last entry stands for no loc."""
    for name, attribute in (
        ("loc to window table", "full_to_swa_index_mapping"),
        ("loc to device table", "full_to_hisparse_device_index_mapping"),
    ):
        found = getattr(allocator, attribute, None)
        if found is not None:
            rows = found.shape[0] - 1
            size = rows - loc.page_size
            yield Pool(name, "Tensor", size, loc.page_size, rows, "loc", loc.size, loc.page_size)


def _pools(name: str, runner: SimpleNamespace, ids: dict, *, is_draft: bool) -> Iterator[Pool]:
    for part, pool, kind in _parts(runner.token_to_kv_pool, ids, is_draft):
        space = ids[kind]
        per_row, why = _ids_per_row(pool, is_draft) if kind == "loc" else (1, "")
        yield Pool(
            name=f"{name} {part}pool",
            cls=type(pool).__name__,
            size=pool.size,
            page_size=pool.page_size,
            rows=_rows(pool),
            ids=kind,
            space=space.size,
            space_page=space.page_size,
            ids_per_row=per_row,
            why=why,
        )
        if hasattr(pool, "index_k_with_scale_buffer"):
            yield from _index_keys(name, pool, ids["loc"])


def _parts(pool, ids: dict, is_draft: bool) -> Iterator[tuple[str, object, str]]:
    """Each pool that holds rows: the part that it is, and the kind of id that indexes it."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MiniMaxSparseKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    device = "device id" if "device id" in ids and not is_draft else "loc"
    if isinstance(pool, HybridLinearKVPool):
        yield "", pool.full_kv_pool, "loc"
    elif isinstance(pool, SWAKVPool):
        if pool.full_layer_nums:
            yield "", pool.full_kv_pool, "loc"
        if pool.swa_layer_nums and "window id" in ids:
            by_loc = getattr(pool, "swa_uses_full_indices", False)
            yield "window ", pool.swa_kv_pool, "loc" if by_loc else "window id"
    elif isinstance(pool, MiniMaxSparseKVPool):
        dense = vars(pool).get("dense_pool")
        found = [("", pool.main_pool, device), ("dense ", dense, "loc")]
        found += [("index ", pool.index_kv_pool, "loc"), ("index key ", pool.index_k_pool, "loc")]
        yield from (part for part in found if part[1] is not None)
    else:
        yield "", pool, device


def holders(pool) -> list:
    """The pools inside `pool` that hold tensors, and itself."""
    kinds = dict.fromkeys(("loc", "window id"))
    return [pool, *(part for _, part, _ in _parts(pool, kinds, is_draft=True))]


def _rows(pool) -> int:
    """Rows of its first layer's buffer. Stopped for a pool of another make (DeepSeek-V4)."""
    for name in ("kv_buffer", "k_buffer"):
        if hasattr(pool, name):
            return getattr(pool, name)[0].shape[0]
    raise Stopped("kvgeom", f"a plan does not cover {type(pool).__name__}: it has no row per loc")


def _ids_per_row(pool, is_draft: bool) -> tuple[int, str]:
    """How many locs share a row, and what to tell where the backend decides it."""
    from sglang.srt.runtime_context import attention_backends, get_parallel

    if hasattr(pool, "_write_loc_dcp_span"):  # MLA: the pool itself translates
        return pool._write_loc_dcp_span, ""
    dcp_size = get_parallel().attn_dcp_size
    if is_draft or dcp_size == 1:
        return 1, ""
    raw = [backend for backend in attention_backends() if backend != DIVIDES]
    if raw:
        return 1, f"attention backend {raw[0]} writes locs undivided, {DIVIDES} divides them by DCP"
    return dcp_size, ""


def _index_keys(name: str, pool, loc) -> Iterator[Pool]:
    """Rows of pages; a layer that shares another's top-k has none."""
    held = [buffer for buffer in pool.index_k_with_scale_buffer if buffer.shape[0]]
    if not held:
        return
    key = pool.index_head_dim + pool.index_head_dim // pool.quant_block_size * 4  # and its scales
    page = held[0].shape[1] * getattr(pool, "index_kpool", 1) // key
    rows = held[0].shape[0] * page
    cls = type(pool).__name__
    yield Pool(f"{name} index keys", cls, rows - page, page, rows, "loc", loc.size, loc.page_size)
