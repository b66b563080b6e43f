"""The gates themselves, for SGLang 0.5.23. See `gates`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType

from kvgeom.cpu_engine.gates import View, answer_inside, answer_to, gate


@gate(
    "sglang.srt.distributed.parallel_state",
    why="groups for decode context parallelism are refused unless the platform is a GPU or NPU",
    expects={
        "initialize_model_parallel": "backend duplicate_tp_group enable_symm_mem recovered_rank"
        " rank_offset max_world_size",
        "is_hip": "",
    },
)
def dcp_groups(module: ModuleType) -> None:
    # To this function alone: the coordinators that it builds must stay CPU ones.
    answer_to(module, "is_hip", ["initialize_model_parallel"], lambda own: True)


@gate(
    "sglang.srt.utils.numa_utils",
    why="wants a NUMA node per rank for a thread binding that only AMX machines make",
    expects={"init_threads_binding": "numa_index world_size"},
)
def thread_binding(module: ModuleType) -> None:
    module.init_threads_binding = lambda *, numa_index, world_size: None


@gate(
    "sglang.srt.managers.load_snapshot",
    why="keeps a file in /dev/shm that a killed engine leaves behind; put it with its sockets",
    expects={"shm_path_for": "ipc_name"},
)
def load_snapshot_with_the_sockets(module: ModuleType) -> None:
    module.shm_path_for = lambda ipc_name: str(Path(tempfile.gettempdir(), f"{ipc_name}.loads"))


@gate(
    "sglang.srt.configs.update_config",
    why="CPU tensor parallelism pads KV heads with zero heads; DCP needs them replicated",
    expects={"adjust_config_with_unaligned_cpu_tp": "model_config load_config tp_size"},
)
def replicated_kv_heads(module: ModuleType) -> None:
    module.adjust_config_with_unaligned_cpu_tp = lambda model_config, load_config, tp_size: (
        model_config
    )


@gate(
    "sglang.srt.mem_cache.allocation",
    why="the page of a widened allocator is only asked for on GPUs and NPUs",
    expects={"_alloc_page_size": "batch", "_is_cuda": None},
)
def allocator_page(module: ModuleType) -> None:
    answer_inside(module, "_alloc_page_size", module, _is_cuda=True)


@gate(
    "sglang.srt.speculative.eagle_utils",
    why="CPU verify expects the AMX kernel's mask layout; the Triton kernels read the full mask",
    expects={"default_tree_mask_mode": "", "_is_cpu": None},
)
def full_tree_mask(module: ModuleType) -> None:
    answer_inside(module, "default_tree_mask_mode", module, _is_cpu=False)


@gate(
    "sglang.srt.layers.attention.triton_backend",
    why="a draft is replicated and takes no part in DCP; this backend knows that of DSPARK only",
    expects={
        "get_parallel": "",
        "TritonAttnBackend.__init__": "self model_runner skip_prefill kv_indptr_buf dllm_fa4",
    },
)
def draft_outside_dcp(module: ModuleType) -> None:
    backend = module.TritonAttnBackend
    build = backend.__init__

    def __init__(self, model_runner, *args, **kwargs):
        if not model_runner.is_draft_worker:
            return build(self, model_runner, *args, **kwargs)
        ask = module.get_parallel
        module.get_parallel = lambda: View(ask(), attn_dcp_size=1, attn_dcp_rank=0)
        try:
            return build(self, model_runner, *args, **kwargs)
        finally:
            module.get_parallel = ask

    backend.__init__ = __init__


@gate(
    "sglang.srt.layers.attention.triton_backend",
    why="chain verify under DCP reads the whole prefix through a mask; give it this rank's shard",
    expects={
        "TritonAttnBackend.init_forward_metadata": "self forward_batch",
        "TritonAttnBackend._dcp_kv_indices": "self req_pool_indices lens kv_indptr kv_indices"
        " kv_start_idx",
    },
)
def chain_verify_under_dcp(module: ModuleType) -> None:
    backend = module.TritonAttnBackend
    plan = backend.init_forward_metadata

    def init_forward_metadata(self, forward_batch):
        plan(self, forward_batch)
        if self.dcp_size == 1 or not forward_batch.forward_mode.is_target_verify():
            return
        metadata = self.forward_metadata
        # A chain's mask is the causal one, which the extend kernel applies by itself.
        metadata.custom_mask = metadata.mask_indptr = None
        metadata.kv_indptr, metadata.kv_indices, _ = self._dcp_kv_indices(
            forward_batch.req_pool_indices, forward_batch.seq_lens, self.kv_indptr
        )

    backend.init_forward_metadata = init_forward_metadata
