"""Real HiCache host pools on CPU: not pinned, copies by torch, drafts registered as
a boot registers them."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import kv_cache_builder, memory_pool_host
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
)
from sglang.srt.mem_cache.memory_pool import KVCache, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.pool_host import base, common, mha, mla
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

try:
    from sglang.srt.mem_cache.pool_host import dsa
except ImportError:
    dsa = memory_pool_host

HAS_LEGACY_PATH = hasattr(HiCacheController, "set_draft_kv_pool")
HAS_SIDECARS = hasattr(assembler, "build_hicache_draft_sidecars")

_MEMORY = SimpleNamespace(
    hicache_ratio=2.0,
    hicache_size=0,
    hicache_mem_layout="layer_first",
    hicache_io_backend="direct",
    hicache_storage_backend=None,
)
# What the builders read off ServerArgs where they are still handed it.
_SERVER_ARGS = SimpleNamespace(**vars(_MEMORY), enable_multi_layer_eagle=False)


def copy_pages(*, src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    """The direct copy: `page_size` rows from the first index of each page. An index
    outside a buffer raises, where a device kernel would write."""
    src, dst = (_page_rows(i, page_size) for i in (src_indices, dst_indices))
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst] = source[src]


def _page_rows(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return (indices.view(-1, page_size)[:, :1] + torch.arange(page_size)).flatten()


@contextlib.contextmanager
def cpu_host_pools(*, dcp_size: int = 1, dcp_rank: int = 0):
    """Host pools can be built and moved without a device, on one DCP rank."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            get_parallel().override(
                dcp_enabled=dcp_size > 1,
                attn_dcp_size=dcp_size,
                attn_dcp_rank=dcp_rank,
            )
        )
        for module in {mha, mla, dsa, memory_pool_host}:
            stack.enter_context(
                patch.object(module, "transfer_kv_direct", copy_pages, create=True)
            )
        stack.enter_context(
            patch.object(common, "_cuda_host_register", lambda *args, **kwargs: None)
        )
        for module in (assembler, common):
            if hasattr(module, "get_memory"):
                stack.enter_context(patch.object(module, "get_memory", lambda: _MEMORY))
        for module in (base, memory_pool_host):
            if hasattr(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):
                stack.enter_context(
                    patch.object(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
                )
        yield


def mla_host_pool(
    pool: MLATokenToKVPool, *, page_size: int, dcp_size: int, dcp_rank: int = 0
) -> MLATokenToKVPoolHost:
    """The host pool of an MLA target, twice its rows; `page_size` as allocated."""
    kwargs = {
        "host_to_device_ratio": _MEMORY.hicache_ratio,
        "host_size": 0,
        "page_size": page_size,
        "layout": _MEMORY.hicache_mem_layout,
        "dcp_size": dcp_size,
        "dcp_rank": dcp_rank,
    }
    if "buffer_info" not in inspect.signature(MLATokenToKVPoolHost).parameters:
        return MLATokenToKVPoolHost(pool, **kwargs)
    return MLATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info,
        device_capacity_tokens=pool.size,
        start_layer=pool.start_layer,
        end_layer=pool.end_layer,
        target_layer_num=pool.layer_num,
        **kwargs,
    )


def register_draft(
    draft_pool: KVCache,
    targets: dict[PoolName, tuple[KVCache, HostKVCache]],
    *,
    page_size: int,
) -> dict[PoolName, HostKVCache]:
    """The sidecars of `draft_pool` beside the target pools (device, host), as the
    unified radix cache has them. `page_size` is the allocator's."""
    if not HAS_SIDECARS:
        return register_legacy_draft(
            draft_pool, targets[PoolName.KV][1], page_size=page_size
        )
    tree = unified_tree(targets, page_size=page_size)
    _register(tree, draft_pool, page_size)
    return {
        spec.pool_name: tree.cache_controller.mem_pool_host.get_pool(spec.pool_name)
        for spec in tree.sidecar_pool_specs
    }


def unified_tree(
    targets: dict[PoolName, tuple[KVCache, HostKVCache]], *, page_size: int
) -> UnifiedRadixCache:
    """A unified radix cache with the target pools (device, host), as far as the
    registration of sidecars goes."""
    mapping = {"layer_mapping": {0: 0}}
    entry = inspect.signature(assembler.build_pool_entry).parameters
    mapping |= {name: 8 for name in entry if name.startswith("transfer_layer")}
    group = assembler.HostPoolGroup(
        [
            assembler.build_pool_entry(
                name=name,
                host_pool=host,
                device_pool=device,
                is_anchor=name is PoolName.KV,
                **mapping,
            )
            for name, (device, host) in targets.items()
        ]
    )
    controller = _hollow(
        HybridCacheController,
        mem_pool_host=group,
        page_size=page_size,
        transfer_layer_id_max=8,
        extra_host_mem_release_queues={},
        enable_storage=False,
    )
    return _hollow(
        UnifiedRadixCache, cache_controller=controller, sidecar_pool_specs=[]
    )


def register_legacy_draft(
    draft_pool: KVCache, target: HostKVCache, *, page_size: int
) -> dict[PoolName, HostKVCache]:
    """The same on the controller, where releases before the sidecars put it."""
    controller = _hollow(HiCacheController, mem_pool_host=target, enable_storage=False)
    _register(SimpleNamespace(cache_controller=controller), draft_pool, page_size)
    return {PoolName.DRAFT: controller.mem_pool_host_draft}


def _hollow(cls: type, **attributes):
    """An instance with only what registration reads."""
    made = cls.__new__(cls)
    vars(made).update(attributes)
    return made


def _register(tree_cache, draft_pool: KVCache, page_size: int) -> None:
    runner = SimpleNamespace(token_to_kv_pool=draft_pool)
    given = {
        "tree_cache": tree_cache,
        "draft_worker": SimpleNamespace(
            draft_worker=SimpleNamespace(draft_runner=runner)
        ),
        "spec_algorithm": SpeculativeAlgorithm.DSPARK,
        "server_args": _SERVER_ARGS,
        "enable_hierarchical_cache": True,
        "page_size": page_size,
    }
    register = kv_cache_builder.maybe_register_hicache_draft
    wanted = inspect.signature(register).parameters
    if "draft_plan" in wanted:
        from sglang.srt.speculative.base_spec_worker import (
            HiCacheDraftMode,
            HiCacheDraftPlan,
        )

        given["draft_plan"] = HiCacheDraftPlan(
            mode=HiCacheDraftMode.SIDECAR, device_pools=(draft_pool,)
        )
    register(**{name: given[name] for name in wanted})
