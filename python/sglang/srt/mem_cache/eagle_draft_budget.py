"""What an EAGLE or STANDALONE draft's own KV pool costs its target's budget.

    target   [0, tokens)          one row a token of this rank's budget
    draft    [0, tokens * rows)   one row a loc: `draft_rows_per_token`

A row's bytes are the draft model's, not the target's: its heads are not spread
over DCP ranks, and its attention may be of another kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    *, kvc: KVCacheConfigurator, target_layer_bytes: int
) -> int:
    """Bytes per token of the target that `kvc` sizes; 0 where no such draft runs.

    A draft whose row is not known (block-scaled KV) is charged
    `target_layer_bytes` a layer.
    """
    if not _is_charged(kvc) or target_layer_bytes <= 0:
        # No draft, or no KV on this pipeline stage.
        return 0
    config = kvc.spec_aux_config.draft_model_config
    if config is None:
        return 0
    layers = _num_layers(config) * _num_runners(config)
    return _bytes(kvc, config, layers, target_layer_bytes)


def eagle_draft_swa_bytes_per_token(
    *,
    kvc: KVCacheConfigurator,
    full_layer_bytes: int,
    swa_layer_bytes: int,
    full_layers: int,
    swa_layers: int,
) -> tuple[int, int]:
    """Bytes per full token and per window token of the draft of a window target.

    `full_layers` and `swa_layers` of one runner hold where the draft does not list
    its layers; the bytes of a target's layer, where the draft's row is not known.
    """
    if not _is_charged(kvc):
        return 0, 0
    config = kvc.spec_aux_config.draft_model_config
    if config is None:
        return full_layer_bytes * full_layers, swa_layer_bytes * swa_layers
    if (
        config.is_draft_model
        and config.is_hybrid_swa
        and not _is_depth_a_runner(config)
    ):
        full_layers = len(config.full_attention_layer_ids)
        swa_layers = len(config.swa_attention_layer_ids)
    runners = _num_runners(config)
    return (
        _bytes(kvc, config, full_layers * runners, full_layer_bytes),
        _bytes(kvc, config, swa_layers * runners, swa_layer_bytes, is_window=True),
    )


def _is_charged(kvc: KVCacheConfigurator) -> bool:
    algorithm = kvc.spec_algorithm
    is_own_pool = algorithm.is_eagle() or algorithm.is_standalone()
    return is_own_pool and not kvc.is_draft_worker


def _bytes(
    kvc: KVCacheConfigurator,
    config: ModelConfig,
    num_layers: int,
    target_layer_bytes: int,
    *,
    is_window: bool = False,
) -> int:
    block_scaled = (
        is_float4_e2m1fn_x2(kvc.kv_cache_dtype) or kvc.kv_cache_dtype_str == "mxfp8"
    )
    is_mla = config.attention_arch == AttentionArch.MLA
    if block_scaled or (is_window and is_mla):
        layer_bytes = target_layer_bytes
    elif is_window and config.is_hybrid_swa_compress:
        heads = config.get_swa_num_kv_heads(get_parallel().attn_tp_size)
        head_bytes = config.swa_head_dim + config.swa_v_head_dim
        layer_bytes = heads * head_bytes * kvc.kv_cache_dtype.itemsize
    else:
        layer_bytes = _layer_bytes(kvc, config)
    return layer_bytes * num_layers * kvc.draft_rows_per_token


def _num_layers(config: ModelConfig) -> int:
    """KV layers of one runner of the draft."""
    if mambaish_config(config) is not None:
        # A hybrid draft's pool holds its one attention layer.
        return 1
    return config.num_nextn_predict_layers or max(
        config.num_hidden_layers, config.num_attention_layers
    )


def _num_runners(config: ModelConfig) -> int:
    """A multi-layer draft is one runner a step, each with a pool of its own."""
    if not config.is_multi_layer_eagle or _is_depth_a_runner(config):
        return 1
    return get_spec().speculative_num_steps


def _is_depth_a_runner(config: ModelConfig) -> bool:
    # All runners share one list of layers, and each builds its own of them.
    return config.hf_config.architectures[0] in (
        "InklingForConditionalGeneration",
        "InklingForConditionalGenerationMTP",
    )


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
