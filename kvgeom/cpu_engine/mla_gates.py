"""The gates of the MLA pair, for SGLang 0.5.23. See `gates`."""

from __future__ import annotations

from types import ModuleType

from kvgeom.cpu_engine import flashinfer_mla
from kvgeom.cpu_engine.gates import View, answer_inside, answer_to, gate


@gate(
    "sglang.srt.arg_groups.overrides",
    why="the trtllm_mla and cutedsl_mla backends are only allowed on Blackwell",
    expects={
        "get_platform": "",
        "_cutedsl_prefill_backend_fill": "view",
        "_mla_kv_cache_dtype_checks": "view",
    },
)
def mla_backends_off_blackwell(module: ModuleType) -> None:
    answer_to(
        module,
        "get_platform",
        ["_cutedsl_prefill_backend_fill", "_mla_kv_cache_dtype_checks"],
        lambda own: View(own, is_blackwell=True, is_sm100=True),
    )


@gate(
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha",
    why="only CUDA prefill writes through set_mla_kv_buffer, the one that knows DCP",
    expects={
        "DeepseekMHAForwardMixin._set_mla_kv_buffer": "self latent_cache kv_a k_pe forward_batch",
        "DeepseekMHAForwardMixin._get_mla_kv_buffer": "self kv_indices dst_dtype forward_batch",
        "_is_cuda": None,
    },
)
def mla_prefill_write(module: ModuleType) -> None:
    for method in ("_set_mla_kv_buffer", "_get_mla_kv_buffer"):
        answer_inside(module.DeepseekMHAForwardMixin, method, module, _is_cuda=True)


@gate(
    "sglang.srt.layers.attention.flashinfer_mla_backend",
    why="builds FlashInfer wrappers and pinned buffers that only a GPU has",
    expects={"FlashInferMLAAttnBackend": None, "torch": None},
)
def mla_base_backend(module: ModuleType) -> None:
    import torch

    def zeros(*args, pin_memory=False, **kwargs):
        return torch.zeros(*args, **kwargs)

    module.torch = View(torch, zeros=zeros)
    module.BatchPrefillWithRaggedKVCacheWrapper = flashinfer_mla.UnusedWrapper
    module.BatchMLAPagedAttentionWrapper = flashinfer_mla.UnusedWrapper


@gate(
    "sglang.srt.layers.attention.trtllm_mla_backend",
    why="calls FlashInfer kernels, counts SMs and compiles CUDA",
    expects={
        "_jit_fixup_module": "dtype",
        "_multi_ctas_kv_counter_bytes": "device num_q_heads batch_size",
        "TRTLLMMLABackend": None,
    },
)
def trtllm_mla_kernels(module: ModuleType) -> None:
    module.flashinfer = flashinfer_mla.flashinfer
    module.fixup_zero_kv_rows = flashinfer_mla.fixup_zero_kv_rows
    module._jit_fixup_module = lambda dtype: None
    module._multi_ctas_kv_counter_bytes = lambda device, num_q_heads, batch_size: 1


@gate(
    "sglang.srt.layers.attention.cutedsl_mla_backend",
    why="calls FlashInfer kernels",
    expects={"CuteDslMLABackend": None, "fixup_zero_kv_rows": None},
)
def cutedsl_mla_kernels(module: ModuleType) -> None:
    module.flashinfer = flashinfer_mla.flashinfer
    module.fixup_zero_kv_rows = flashinfer_mla.fixup_zero_kv_rows
