"""Every KV allocator family of `srt/mem_cache`, built with its real pool on CPU."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Callable, NamedTuple, Optional

import torch

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.hisparse import HiSparseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.allocator.swa import (
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.unified_hybrid_swa import UnifiedSWAAllocatorBase
from sglang.srt.mem_cache.allocator.unified_mamba import (
    UnifiedMambaTokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import (
    KVCache,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_memory_pool import (
    init_unified_mamba_pools,
    init_unified_mamba_swa_pools,
    init_unified_swa_pools,
)
from sglang.srt.model_executor.model_runner_components.layer_setup import (
    ModelLayerInfo,
)
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import get_schedule, get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

_DTYPE = torch.float32
_OWNER = {"dtype": _DTYPE, "device": "cpu", "need_sort": False}
_UNIFIED = {
    "device": "cpu",
    "kv_cache_dtype": _DTYPE,
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


def mha_pool(size: int, page_size: int) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=_DTYPE,
        head_num=1,
        head_dim=4,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )


def swa_pool(size: int, size_swa: int, page_size: int, full_layers=(0,)) -> SWAKVPool:
    return SWAKVPool(
        size=size,
        size_swa=size_swa,
        page_size=page_size,
        dtype=_DTYPE,
        head_num=1,
        head_dim=4,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=list(full_layers),
        device="cpu",
    )


def _mamba_params(layers: list[int]) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=8,
        n_groups=1,
        num_heads=2,
        head_dim=4,
        state_size=4,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, layers=layers)


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
        dtype=_DTYPE,
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


def _page_interleave(size, page_size, dcp_size):
    pool = mha_pool(size, page_size)
    allocator = PageInterleavePoolAllocator(
        size, physical_page_size=page_size, shard_size=3, kvcache=pool, **_OWNER
    )
    return allocator, pool


def _unified_mamba(size, page_size, dcp_size):
    bundle = init_unified_mamba_pools(
        **_UNIFIED,
        **_MAMBA,
        page_size=page_size,
        is_draft_worker=False,
        use_mla_backend=False,
        mamba_layer_ids=[1],
        full_attention_layer_ids=[0],
        mamba2_cache_params=_mamba_params([1]),
        max_total_num_tokens=size,
    )
    return bundle.token_to_kv_pool_allocator, bundle.token_to_kv_pool


def unified_swa(size, page_size, dcp_size, fused_draft=None):
    bundle = init_unified_swa_pools(
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
    bundle = init_unified_mamba_swa_pools(
        **{**_UNIFIED, "end_layer": 3},
        **_MAMBA,
        **_SWA_HEADS,
        page_size=page_size,
        swa_attention_layer_ids=[1],
        full_attention_layer_ids=[0],
        mamba_layer_ids=[2],
        mamba2_cache_params=_mamba_params([2]),
        full_max_total_num_tokens=size,
        swa_max_total_num_tokens=size,
        sliding_window_size=page_size,
    )
    return bundle.token_to_kv_pool_allocator, bundle.token_to_kv_pool


def draft_configurator(
    allocator: BaseTokenToKVPoolAllocator,
    *,
    model_path: str,
    max_total_num_tokens: int,
    algorithm: str = "EAGLE3",
    use_mla_backend: bool = False,
) -> KVCacheConfigurator:
    """The configurator of a draft runner that shares `allocator`, as a runner
    builds it; `max_total_num_tokens` is the target's figure, per rank."""
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=ModelConfig(model_path=model_path),
        server_args=get_server_args(),
        kv_cache_dtype=_DTYPE,
        model_dtype=_DTYPE,
        page_size=get_schedule().page_size,
        sliding_window_size=None,
        spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        is_draft_worker=True,
        post_capture_kv_active=False,
        spec_aux_config=SpecAuxHiddenStateConfig(),
        is_hybrid_swa=False,
        is_hybrid_swa_compress=False,
        use_mla_backend=use_mla_backend,
        layer_info=ModelLayerInfo(start_layer=0, end_layer=1, num_effective_layers=1),
        forward_stream=None,
        req_to_token_pool=ReqToTokenPool(
            size=2, max_context_len=64, device="cpu", enable_memory_saver=False
        ),
        token_to_kv_pool_allocator=allocator,
        memory_pool_config=MemoryPoolConfig(
            max_total_num_tokens=max_total_num_tokens, max_running_requests=2
        ),
    )


_TINY = {
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}
TINY_LLAMA = {
    **_TINY,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 1,
    "head_dim": 4,
}
TINY_DSA = {
    **_TINY,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_key_value_heads": 8,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "index_topk": 8,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "rope_theta": 10000.0,
}


def write_config(config: dict) -> str:
    """A model folder holding only config.json; the caller removes it."""
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    return folder


FAMILIES = (
    Family("token", _token, page_sizes=(1,)),
    Family("paged", _paged, widens=True),
    Family("swa", _swa),
    Family("pure_swa", _pure_swa, page_sizes=(1,)),
    Family("hisparse", _hisparse),
    Family("page_interleave", _page_interleave),
    Family("unified_mamba", _unified_mamba, widens=True),
    Family("unified_swa", unified_swa),
    Family("unified_mamba_swa", _unified_mamba_swa),
)


def drain(allocator: BaseTokenToKVPoolAllocator) -> set[int]:
    """Every loc that `allocator` can hand out, found by taking pages."""
    if isinstance(
        allocator, (UnifiedMambaTokenToKVPoolAllocator, UnifiedSWAAllocatorBase)
    ):
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
    # Freed ids queue up last: taking and freeing one page meets all of them.
    locs = set()
    while not locs.issuperset((page := allocator.alloc(allocator.page_size)).tolist()):
        locs.update(page.tolist())
        allocator.free(page)
    return locs


def _take_page(allocator: BaseTokenToKVPoolAllocator) -> Optional[torch.Tensor]:
    page_size = allocator.page_size
    if isinstance(allocator, PageInterleavePoolAllocator):
        for start_class in range(allocator.shard_size):
            page = allocator.alloc_cyclic(start_class, page_size)
            if page is not None:
                return page
        return None
    if isinstance(allocator, SWATokenToKVPoolAllocator) and page_size > 1:
        lens = torch.tensor([0, page_size], dtype=torch.int64)
        return allocator.alloc_extend(
            lens[:1], lens[:1], lens[1:], lens[1:], torch.tensor([-1]), page_size
        )
    return allocator.alloc(page_size)
