"""What an EAGLE or STANDALONE draft's own KV pool costs its target's budget.

    target   [0, tokens)          one row a token of this rank's budget
    draft    [0, tokens * rows)   one row a loc: `draft_rows_per_token`

A row's bytes are the draft model's, not the target's: its heads are not spread
over DCP ranks, and its attention may be of another kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    ModelConfig,
    get_dsa_index_head_dim,
    get_dsa_index_kpool,
    is_deepseek_dsa,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.utils.common import ceil_div, is_float4_e2m1fn_x2, is_npu

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator


def eagle_draft_bytes_per_token(
    *,
    kvc: KVCacheConfigurator,
    target_layer_bytes: int,
    num_layers: Optional[int] = None,
) -> int:
    """Bytes per token of the target that `kvc` sizes; 0 where no such draft runs.

    `num_layers` limits it to that many of the draft's layers. A draft whose row
    is not known (block-scaled KV) is charged `target_layer_bytes` a layer.
    """
    algorithm = kvc.spec_algorithm
    if kvc.is_draft_worker or not (algorithm.is_eagle() or algorithm.is_standalone()):
        return 0
    if target_layer_bytes <= 0:
        # No KV on this pipeline stage.
        return 0
    config = kvc.spec_aux_config.draft_model_config
    if num_layers is None:
        num_layers = _num_layers(config) if config is not None else 0
    block_scaled = (
        is_float4_e2m1fn_x2(kvc.kv_cache_dtype) or kvc.kv_cache_dtype_str == "mxfp8"
    )
    if config is None or block_scaled:
        layer_bytes = target_layer_bytes
    else:
        layer_bytes = _layer_bytes(kvc, config)
    return layer_bytes * num_layers * kvc.draft_rows_per_token


def _num_layers(config: ModelConfig) -> int:
    """KV layers of all runners of the draft."""
    if mambaish_config(config) is not None:
        # A hybrid draft's pool holds its one attention layer.
        layers = 1
    else:
        layers = config.num_nextn_predict_layers or max(
            config.num_hidden_layers, config.num_attention_layers
        )
    # A multi-layer draft is one runner a step, each with a pool of its own.
    runners = get_spec().speculative_num_steps if config.is_multi_layer_eagle else 1
    return layers * runners


def _layer_bytes(kvc: KVCacheConfigurator, config: ModelConfig) -> int:
    """Bytes of one row in one layer of the draft's pool, index keys included."""
    dtype = kvc.kv_cache_dtype
    if config.attention_arch != AttentionArch.MLA:
        heads = config.get_num_kv_heads(get_parallel().attn_tp_size)
        return heads * (config.head_dim + config.v_head_dim) * dtype.itemsize
    kv_dim = kvc.mla_kv_cache_dim(model_config=config)
    return kv_dim * dtype.itemsize + _index_bytes(config, dtype)


def _index_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    if not is_deepseek_dsa(config.hf_config):
        return 0
    index_dim = get_dsa_index_head_dim(config.hf_config)
    if is_npu() and dtype != torch.float8_e4m3fn:
        return index_dim * dtype.itemsize
    # A float32 scale for each block of quantized keys.
    scale_bytes = index_dim // DSATokenToKVPool.quant_block_size * 4
    key_bytes = index_dim * DSATokenToKVPool.index_k_with_scale_buffer_dtype.itemsize
    return ceil_div(key_bytes + scale_bytes, get_dsa_index_kpool(config.hf_config))
