"""The real host pools of HiCache, built behind the pools of a plan: in the child.

Their tensors have no bytes, and the host's memory is taken as enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from kvgeom.deployment import structures
from kvgeom.deployment.arguments import taken
from kvgeom.deployment.spec import HOST_SLOT, Pool

_ENOUGH = 1 << 60  # bytes


class _Controller:
    """Holds the host pools, as the builders leave them; it moves nothing."""

    enable_storage = False
    layer_done_counter = None

    def __init__(self, allocator, host_pools, page_size, *args, transfer_layer_id_max, **kwargs):
        vars(self).update(kwargs)
        self.mem_pool_host = host_pools
        self.page_size = page_size
        self.transfer_layer_id_max = transfer_layer_id_max

    def register_host_pool_entry(self, entry) -> None:
        self.mem_pool_host.add_entry(entry)


def measure(server_args, target: SimpleNamespace, drafts: list[SimpleNamespace]) -> list[Pool]:
    """Every host pool whose slots another pool's or its own owner hands out."""
    for runner in (target, *drafts):
        for pool in structures.holders(runner.token_to_kv_pool):
            _say_where_it_is(pool)
    with _host_memory():
        cache = _tree_cache(server_args, target, drafts)
    group = cache.cache_controller.mem_pool_host
    follows = {spec.pool_name: spec.indices_from_pool for spec in cache.sidecar_pool_specs}
    made = []
    for entry in group.entries:
        owner = group.get_pool(follows.get(entry.name, entry.name))
        if hasattr(owner, "logical_size"):  # states have a slot a request
            made.append(_pool(entry.name.value, entry.host_pool, owner))
    return made


def _say_where_it_is(pool) -> None:
    """The builders compare a pool's device with that of its tensors."""
    pool.device = torch.device("meta")
    if hasattr(pool, "data_ptrs"):
        pool.data_ptrs = pool.data_ptrs.to("meta")


def _pool(name: str, pool, owner) -> Pool:
    """`owner` hands out its logical slots from 0; its own rows are shared by the DCP ranks."""
    page = owner.page_size * owner.dcp_size
    return Pool(
        name=f"host pool {name}",
        cls=type(pool).__name__,
        size=pool.size,
        page_size=pool.page_size,
        rows=pool.size,
        ids=HOST_SLOT,
        space=owner.size * owner.dcp_size - page,
        space_page=page,
        ids_per_row=pool.dcp_size,
    )


@contextmanager
def _host_memory() -> Iterator[None]:
    """Inside, host pools take none of this machine's memory."""
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
    from sglang.srt.mem_cache.pool_host import base, common

    def on_meta(self, dims, dtype, device) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device="meta")

    with (
        patch.object(assembler, "HybridCacheController", _Controller),
        patch.object(base, "available_host_memory_bytes", lambda **kwargs: _ENOUGH),
        patch.object(base.HostKVCache, "clear", lambda self: None),  # lists the free slots
        patch.object(common.HostTensorAllocator, "allocate", on_meta),
        patch.object(common, "_cuda_host_register", lambda *args, **kwargs: None),
    ):
        yield


def _tree_cache(server_args, target: SimpleNamespace, drafts: list[SimpleNamespace]):
    """The radix cache of a scheduler, which builds the host pools and registers the draft's."""
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.runtime_context import get_parallel, get_schedule
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    parallel = get_parallel()
    groups = {
        f"{name}_group": SimpleNamespace(cpu_group=None, world_size=size)
        for name, size in (
            ("tp", parallel.tp_size),
            ("attn_tp", parallel.attn_tp_size),
            ("attn_cp", parallel.attn_cp_size),
            ("pp", parallel.pp_size),
        )
    }
    worker = SimpleNamespace(
        model_runner=target,
        is_hybrid_swa=target.configurator.is_hybrid_swa,
        sliding_window_size=target.configurator.sliding_window_size,
        get_tokens_per_layer_info=lambda: (
            target.memory_pool_config.full_max_total_num_tokens,
            target.memory_pool_config.swa_max_total_num_tokens,
        ),
        get_memory_pool=lambda: (target.req_to_token_pool, target.token_to_kv_pool_allocator),
        register_hicache_layer_transfer_counter=lambda counter: None,
    )
    drafting = SimpleNamespace(
        target_worker=worker,
        draft_worker=SimpleNamespace(
            draft_runners=drafts, model_runner=drafts[0] if drafts else None
        ),
    )
    drafting._draft_model_runners = lambda: tuple(drafts)
    with ExitStack() as stack:
        stack.enter_context(parallel.override(**groups))
        if hasattr(kv_cache_builder, "get_dp_tp_group"):  # older ones are given the groups
            dp_group = groups["tp_group"]
            stack.enter_context(patch.object(kv_cache_builder, "get_dp_tp_group", lambda: dp_group))
        plan = BaseSpecWorker._build_hicache_draft_plan(drafting)
        return taken(
            kv_cache_builder.build_kv_cache,
            server_args=server_args,
            model_config=target.model_config,
            tp_worker=worker,
            page_size=get_schedule().page_size,
            spec_algorithm=target.spec_algorithm,
            enable_metrics=False,
            enable_kv_cache_events=False,
            enable_hierarchical_cache=True,
            hicache_draft_plan=plan,
            tp_group=groups["tp_group"],
            pp_group=groups["pp_group"],
            **dict.fromkeys(("attn_tp_cpu_group", "tp_cpu_group", "attn_cp_cpu_group")),
        ).tree_cache
