"""What a draft's own KV pools cost its target's budget.

    target   [0, tokens)          one row a token of this rank's budget
    draft    [0, tokens * rows)   one row a loc: `draft_rows_per_token`

A row's bytes are the draft model's, not the target's: its heads are not spread
over DCP ranks, its attention may be of another kind, and so may its KV dtype.
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
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import fp4_row_bytes
from sglang.srt.mem_cache.kv_cache_dtype import eagle_draft_kv_cache_dtype
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPoolMXFP8,
)
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.utils.common import ceil_div, is_float4_e2m1fn_x2, is_npu

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator


def eagle_draft_bytes_per_token(*, kvc: KVCacheConfigurator) -> int:
    """Bytes per token of the target that `kvc` sizes, of an EAGLE or STANDALONE
    draft; 0 where no such draft runs."""
    config = _charged_draft(kvc)
    if config is None:
        return 0
    return _bytes(kvc, config, _num_layers(config))


def eagle_draft_swa_bytes_per_token(
    *,
    kvc: KVCacheConfigurator,
    full_layers: int,
    swa_full_layers: int,
    swa_layers: int,
) -> tuple[int, int]:
    """Bytes per full token and per window token of the draft of a window target.

    The layers of one runner, where the draft does not list its own; of them
    `swa_full_layers` are windows with a row for each full token.
    """
    config = _charged_draft(kvc)
    if config is None:
        return 0, 0
    if (
        config.is_draft_model
        and config.is_hybrid_swa
        and not _is_depth_a_runner(config)
    ):
        full_layers = len(config.full_attention_layer_ids)
        swa_layers = len(config.swa_attention_layer_ids)
    return (
        _bytes(kvc, config, full_layers)
        + _bytes(kvc, config, swa_full_layers, is_window=True),
        _bytes(kvc, config, swa_layers, is_window=True),
    )


def mha_row_bytes(
    *,
    head_num: int,
    head_dim: int,
    v_head_dim: int,
    num_layers: int,
    dtype: torch.dtype,
    dtype_str: Optional[str],
) -> int:
    """Bytes of one row of an MHA pool over its layers, scales included."""
    if is_float4_e2m1fn_x2(dtype) and dtype_str is not None:
        return fp4_row_bytes(
            recipe=dtype_str,
            head_num=head_num,
            head_dim=head_dim,
            num_layers=num_layers,
        )
    elements = head_num * (head_dim + v_head_dim) * num_layers
    row_bytes = elements * dtype.itemsize
    if dtype_str == "mxfp8" and dtype == torch.float8_e4m3fn:
        row_bytes += elements // MHATokenToKVPoolMXFP8.MXFP8_SCALE_BLOCK_SIZE
    return row_bytes


def _charged_draft(kvc: KVCacheConfigurator) -> Optional[ModelConfig]:
    """The draft whose pools are its own, and that `kvc`, its target's, pays for."""
    algorithm = kvc.spec_algorithm
    is_own_pool = algorithm.is_eagle() or algorithm.is_standalone()
    if not is_own_pool or kvc.is_draft_worker:
        return None
    return kvc.spec_aux_config.draft_model_config


def _bytes(
    kvc: KVCacheConfigurator,
    config: ModelConfig,
    num_layers: int,
    *,
    is_window: bool = False,
) -> int:
    """Over all runners, per token: `num_layers` is of one runner."""
    if num_layers == 0:
        return 0
    dtype_str, dtype = eagle_draft_kv_cache_dtype(
        model=kvc.model, draft_dtype=config.dtype
    )
    if config.attention_arch == AttentionArch.MLA:
        row_bytes = num_layers * _mla_layer_bytes(kvc, config, dtype, is_window)
    else:
        row_bytes = _mha_pool_row_bytes(config, num_layers, dtype, dtype_str, is_window)
    return row_bytes * _num_runners(config) * kvc.draft_rows_per_token


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


def _mha_pool_row_bytes(
    config: ModelConfig,
    num_layers: int,
    dtype: torch.dtype,
    dtype_str: str,
    is_window: bool,
) -> int:
    tp_size = get_parallel().attn_tp_size
    if is_window and config.is_hybrid_swa_compress:
        head_num = config.get_swa_num_kv_heads(tp_size)
        head_dim, v_head_dim = config.swa_head_dim, config.swa_v_head_dim
    else:
        head_num = config.get_num_kv_heads(tp_size)
        head_dim, v_head_dim = config.head_dim, config.v_head_dim
    if config.is_hybrid_swa and is_float4_e2m1fn_x2(dtype):
        # A pool with windows is built without the recipe.
        dtype_str = None
    return mha_row_bytes(
        head_num=head_num,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        num_layers=num_layers,
        dtype=dtype,
        dtype_str=dtype_str,
    )


def _mla_layer_bytes(
    kvc: KVCacheConfigurator, config: ModelConfig, dtype: torch.dtype, is_window: bool
) -> int:
    """Bytes of one row in one layer of the draft's pool, index keys included."""
    if is_window:
        return (config.swa_kv_lora_rank + config.swa_qk_rope_head_dim) * dtype.itemsize
    kv_dim = kvc.mla_kv_cache_dim(model_config=config, kv_cache_dtype=dtype)
    if is_float4_e2m1fn_x2(dtype):
        # Two elements a byte, and a scale for each block of 16.
        return kv_dim // 2 + kv_dim // 16
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
