"""Every KV allocator family of `srt/mem_cache`, built with its real pool on CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from typing import Callable, Iterator, NamedTuple, Optional

import torch

import sglang.srt.mem_cache.unified_memory_pool as unified_memory_pool
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.hisparse import HiSparseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import (
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import KVCache, MiniMaxSparseKVPool
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test import kv_pools
from sglang.test.kv_pools import DTYPE, build_with, mamba_params, mha_pool, swa_pool

_OWNER = {"dtype": DTYPE, "device": "cpu", "need_sort": False}
_UNIFIED = {
    "device": "cpu",
    "kv_cache_dtype": DTYPE,
    "head_num": 1,
    "head_dim": 4,
    "v_head_dim": 4,
    "start_layer": 0,
    "end_layer": 2,
    "enable_memory_saver": False,
    "need_sort": False,
}
_MAMBA = {
    "max_mamba_cache_size": 4,
    "model_context_len": 64,
    "extra_max_context_len": 4,
    "max_num_reqs": 2,
    "enable_mamba_extra_buffer": False,
    "enable_mamba_extra_buffer_lazy": False,
    "speculative_num_draft_tokens": None,
    "disable_overlap_schedule": True,
}
_SWA_HEADS = {"swa_head_num": 1, "swa_head_dim": 4, "swa_v_head_dim": 4}


class Family(NamedTuple):
    """`build(size, page_size, dcp_size)` takes per-rank tokens; `dcp_size` is
    also what `get_parallel().attn_dcp_size` has to be at that time."""

    name: str
    build: Callable[[int, int, int], tuple[BaseTokenToKVPoolAllocator, KVCache]]
    page_sizes: tuple[int, ...] = (1, 4, 16)
    widens: bool = False
    # Whether a draft may share the allocator.
    drafts: bool = True


@contextlib.contextmanager
def topology(
    dcp_size: int, page_size: int, *, tp_size: int = 8, **fields
) -> Iterator[None]:
    """Publish a server whose decode context is split `dcp_size` ways."""
    with (
        kv_pools.remembered_fields(),
        get_context().override_server_args(
            device="cpu",
            tp_size=tp_size,
            dcp_size=dcp_size,
            page_size=page_size,
            **fields,
        ),
        get_parallel().override(
            tp_size=tp_size,
            tp_rank=0,
            attn_tp_size=tp_size,
            attn_tp_rank=0,
            attn_cp_size=1,
            attn_dcp_size=dcp_size,
            attn_dcp_rank=0,
            dcp_enabled=dcp_size > 1,
        ),
    ):
        yield


def _token(size, page_size, dcp_size):
    pool = mha_pool(size, page_size)
    return TokenToKVPoolAllocator(size, kvcache=pool, **_OWNER), pool


def _paged(size, page_size, dcp_size):
    pool = mha_pool(size, page_size)
    allocator = PagedTokenToKVPoolAllocator(
        size * dcp_size, page_size=page_size * dcp_size, kvcache=pool, **_OWNER
    )
    return allocator, pool


def _swa(size, page_size, dcp_size):
    size_swa = size // 2 // page_size * page_size
    pool = swa_pool(size, size_swa, page_size)
    allocator = SWATokenToKVPoolAllocator(
        size, size_swa, page_size=page_size, kvcache=pool, **_OWNER
    )
    return allocator, pool


def _pure_swa(size, page_size, dcp_size):
    pool = swa_pool(0, size, page_size, full_layers=())
    allocator = PureSWATokenToKVPoolAllocator(
        size, page_size=page_size, kvcache=pool, **_OWNER
    )
    return allocator, pool


def _hisparse(size, page_size, dcp_size):
    pool = MiniMaxSparseKVPool(
        size=size,
        page_size=page_size,
        dtype=DTYPE,
        head_num=1,
        head_dim=4,
        idx_head_dim=4,
        dense_layer_ids=[0],
        sparse_layer_ids=[1],
        device="cpu",
        start_layer=0,
        end_layer=2,
        enable_hisparse=True,
        host_to_device_ratio=3,
    )
    allocator = HiSparseTokenToKVPoolAllocator(
        size, page_size=page_size, kvcache=pool, host_to_device_ratio=3, **_OWNER
    )
    return allocator, pool


def _hisparse_dsa(size, page_size, dcp_size):
    pool = HiSparseDSATokenToKVPool(
        size=size,
        page_size=page_size,
        kv_lora_rank=16,
        dtype=DTYPE,
        qk_rope_head_dim=8,
        layer_num=1,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=24,
        host_to_device_ratio=3,
    )
    allocator = HiSparseTokenToKVPoolAllocator(
        size, page_size=page_size, kvcache=pool, host_to_device_ratio=3, **_OWNER
    )
    return allocator, pool


def _page_interleave(size, page_size, dcp_size):
    pool = mha_pool(size, page_size)
    from sglang.srt.mem_cache.allocator.page_interleave import (
        PageInterleavePoolAllocator,
    )

    allocator = PageInterleavePoolAllocator(
        size, physical_page_size=page_size, shard_size=3, kvcache=pool, **_OWNER
    )
    return allocator, pool


def _unified_mamba(size, page_size, dcp_size):
    bundle = build_with(
        unified_memory_pool.init_unified_mamba_pools,
        **_UNIFIED,
        **_MAMBA,
        page_size=page_size,
        is_draft_worker=False,
        use_mla_backend=False,
        mamba_layer_ids=[1],
        full_attention_layer_ids=[0],
        mamba2_cache_params=mamba_params([1]),
        max_total_num_tokens=size,
    )
    return bundle.token_to_kv_pool_allocator, bundle.token_to_kv_pool


def unified_swa(size, page_size, dcp_size, fused_draft=None):
    bundle = build_with(
        unified_memory_pool.init_unified_swa_pools,
        **_UNIFIED,
        **_SWA_HEADS,
        fused_draft=fused_draft,
        page_size=page_size,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        full_max_total_num_tokens=size,
        swa_max_total_num_tokens=size,
    )
    return bundle.token_to_kv_pool_allocator, bundle.token_to_kv_pool


def _unified_mamba_swa(size, page_size, dcp_size):
    bundle = build_with(
        unified_memory_pool.init_unified_mamba_swa_pools,
        **{**_UNIFIED, "end_layer": 3},
        **_MAMBA,
        **_SWA_HEADS,
        page_size=page_size,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        mamba_layer_ids=[2],
        mamba2_cache_params=mamba_params([2]),
        full_max_total_num_tokens=size,
        swa_max_total_num_tokens=size,
        sliding_window_size=page_size,
    )
    return bundle.token_to_kv_pool_allocator, bundle.token_to_kv_pool


def _families() -> Iterator[Family]:
    """The families of this SGLang."""
    yield Family("token", _token, page_sizes=(1,))
    yield Family("paged", _paged, widens=True)
    yield Family("swa", _swa)
    yield Family("pure_swa", _pure_swa, page_sizes=(1,))
    yield Family("hisparse_dsa", _hisparse_dsa, page_sizes=(64,))
    if "enable_hisparse" in inspect.signature(MiniMaxSparseKVPool).parameters:
        yield Family("hisparse", _hisparse)
    if importlib.util.find_spec("sglang.srt.mem_cache.allocator.page_interleave"):
        yield Family("page_interleave", _page_interleave)
    # Unified mamba pools widen since they live among the allocators.
    at = importlib.util.find_spec("sglang.srt.mem_cache.allocator.unified_mamba")
    yield Family("unified_mamba", _unified_mamba, widens=at is not None)
    yield Family("unified_swa", unified_swa, drafts=at is not None)
    if hasattr(unified_memory_pool, "init_unified_mamba_swa_pools"):
        yield Family("unified_mamba_swa", _unified_mamba_swa, drafts=at is not None)


FAMILIES = tuple(_families())


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)


def is_unified(allocator: BaseTokenToKVPoolAllocator) -> bool:
    """Whether one byte buffer backs this allocator and others."""
    return hasattr(allocator, "unified_buffer")


def drain(allocator: BaseTokenToKVPoolAllocator) -> set[int]:
    """Every loc that `allocator` can hand out, found by taking pages."""
    if is_unified(allocator):
        return _cycle(allocator)
    if isinstance(allocator, HiSparseTokenToKVPoolAllocator):
        # Logical locs outnumber device rows, which a host copy would free.
        allocator = allocator.logical_attn_allocator
    locs = set()
    while (page := _take_page(allocator)) is not None:
        locs.update(page.tolist())
        if isinstance(allocator, SWATokenToKVPoolAllocator) and (
            allocator.swa_attn_allocator is not allocator.full_attn_allocator
        ):
            # Window rows run out first; a request gives them back as it slides.
            allocator.free_swa(page)
    return locs


def _cycle(allocator: BaseTokenToKVPoolAllocator) -> set[int]:
    # One byte buffer backs several pools, so not every id can be out at once.
    # Freed ids queue up last: taking and freeing some meets all of them.
    page_size = allocator.page_size
    num_tokens = max(allocator.available_size() // page_size // 2, 1) * page_size
    locs = set()
    while not locs.issuperset((taken := allocator.alloc(num_tokens)).tolist()):
        locs.update(taken.tolist())
        allocator.free(taken)
    return locs


def _take_page(allocator: BaseTokenToKVPoolAllocator) -> Optional[torch.Tensor]:
    page_size = allocator.page_size
    lens = torch.tensor([0, page_size], dtype=torch.int64)
    extend = (lens[:1], lens[:1], lens[1:], lens[1:], torch.tensor([-1]), page_size)
    if hasattr(allocator, "shard_size"):
        owners = range(allocator.shard_size)
        pages = (allocator.alloc_extend(*extend, rotation_bases=[r]) for r in owners)
        return next((page for page in pages if page is not None), None)
    if isinstance(allocator, SWATokenToKVPoolAllocator) and page_size > 1:
        return allocator.alloc_extend(*extend)
    return allocator.alloc(page_size)
