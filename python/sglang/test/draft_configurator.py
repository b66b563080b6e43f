"""The configurator of a draft runner, with tiny models that need no weights."""

from __future__ import annotations

import json
import os
import tempfile
from types import SimpleNamespace

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner_components.layer_setup import (
    ModelLayerInfo,
)
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import get_schedule, get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.kv_pools import DTYPE, build_with


def configurator(**fields) -> KVCacheConfigurator:
    """As a runner builds it on CPU, with no model loaded and on no pipeline."""
    return build_with(
        KVCacheConfigurator,
        device="cpu",
        gpu_id=0,
        ps=SimpleNamespace(attn_dp_size=1, pp_size=1),
        attn_dp_size=1,
        pp_size=1,
        model=None,
        server_args=get_server_args(),
        page_size=get_schedule().page_size,
        post_capture_kv_active=False,
        forward_stream=None,
        **fields,
    )


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
    return configurator(
        pp_group=None,
        model_config=ModelConfig(model_path=model_path),
        kv_cache_dtype=DTYPE,
        model_dtype=DTYPE,
        sliding_window_size=None,
        spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        is_draft_worker=True,
        spec_aux_config=SpecAuxHiddenStateConfig(),
        is_hybrid_swa=False,
        is_hybrid_swa_compress=False,
        use_mla_backend=use_mla_backend,
        layer_info=ModelLayerInfo(start_layer=0, end_layer=1, num_effective_layers=1),
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
TINY_MLA = {
    **_TINY,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
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
    "rope_theta": 10000.0,
}
TINY_DSA = {
    **TINY_MLA,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 8,
    "index_head_dim": 128,
    "index_n_heads": 4,
}


def write_config(config: dict) -> str:
    """A model folder holding only config.json; the caller removes it."""
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    return folder
