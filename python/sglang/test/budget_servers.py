"""Tiny servers, and the drafts they run, one of each kind of KV pool."""

from __future__ import annotations

from typing import NamedTuple

from sglang.test.draft_configurator import TINY_DSA, TINY_LLAMA, TINY_MLA

_CHAIN = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


class Target(NamedTuple):
    """A server without its draft. `fields` are server arguments."""

    name: str
    config: dict
    page_size: int = 4
    fields: dict = {}


class Draft(NamedTuple):
    """`runners`: model runners of the draft, each with a pool of its own."""

    name: str
    algorithm: str
    config: dict
    fields: dict = _CHAIN
    runners: int = 1


def with_blocks(server: Target | Draft) -> Target | Draft:
    """`server` with heads wide enough for the blocks that share a scale."""
    return server._replace(config={**server.config, "head_dim": 64})


_HISPARSE = {
    "enable_hisparse": True,
    "disable_radix_cache": True,
    "hisparse_config": '{"host_to_device_ratio": 3}',
}
_LAYERS = {"num_hidden_layers": 4}
_TWO_HEADS = {"num_key_value_heads": 2, "num_attention_heads": 8}
_SWA = {
    **TINY_LLAMA,
    **_LAYERS,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_key_value_heads": 8,
    "sliding_window": 8,
    "num_local_experts": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_WINDOW_HEADS = {
    **_SWA,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "llama",
    "hybrid_layer_pattern": [1, 0, 1, 0],
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 8,
    "swa_v_head_dim": 4,
    "v_head_dim": 2,
}
_STEP = {
    **_SWA,
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "llama",
    "num_nextn_predict_layers": 3,
}
_MINIMAX = {
    **TINY_LLAMA,
    **_LAYERS,
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "num_key_value_heads": 8,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_disable_index_value": [0, 0, 1, 1],
        "sparse_index_dim": 4,
    },
}
_KIMI = {
    **TINY_MLA,
    **_LAYERS,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    # An entry of the unified buffer is whole 64 bytes.
    "kv_lora_rank": 24,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    },
}

_INKLING = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "text_config": {
        **{name: TINY_LLAMA[name] for name in ("hidden_size", "vocab_size")},
        **_LAYERS,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "swa_num_key_value_heads": 16,
        "swa_head_dim": 32,
        "local_layer_ids": [0, 2],
        "sliding_window_size": 8,
        "num_nextn_predict_layers": 3,
    },
}
_INKLING_LOCAL = {
    **_INKLING,
    "text_config": {**_INKLING["text_config"], "mtp_local_layer_ids": [1, 2]},
}
_DOTS = {
    **TINY_MLA,
    **_LAYERS,
    "architectures": ["Dots3NoteForCausalLM"],
    "model_type": "dots3_note",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window_size": 8,
    "swa_kv_lora_rank": 32,
    "swa_qk_rope_head_dim": 8,
}

MHA = Target("mha", {**TINY_LLAMA, **_LAYERS, "num_key_value_heads": 8})
MQA = Target("mqa", {**TINY_LLAMA, **_LAYERS})
MLA = Target("mla", {**TINY_MLA, **_LAYERS})
DSA = Target("dsa", {**TINY_DSA, **_LAYERS}, page_size=64)
HYBRID_LINEAR = Target("hybrid linear", _KIMI)
UNIFIED = HYBRID_LINEAR._replace(
    name="unified mamba", fields={"enable_unified_memory": True}
)
HYBRID_SWA = Target("hybrid swa", _SWA, fields={"swa_full_tokens_ratio": 0.5})
REQUEST_CAP = HYBRID_SWA._replace(
    name="hybrid swa, request cap",
    fields={"disable_radix_cache": True, "chunked_prefill_size": 64},
)
# Windows with heads of their own; every draft layer of the two is a window.
WINDOW_HEADS = HYBRID_SWA._replace(name="window heads", config=_WINDOW_HEADS)
STEP = HYBRID_SWA._replace(name="window draft", config=_STEP)
INKLING = HYBRID_SWA._replace(name="inkling", config=_INKLING)
INKLING_LOCAL = INKLING._replace(name="inkling local", config=_INKLING_LOCAL)
MLA_WINDOWS = HYBRID_SWA._replace(name="mla windows", config=_DOTS)
UNIFIED_SWA = with_blocks(HYBRID_SWA)._replace(
    name="unified swa",
    fields={**HYBRID_SWA.fields, "enable_unified_memory": True},
)
# Each KV dtype whose elements share scales, with the backends that take it.
BLOCK_SCALED = (
    {"kv_cache_dtype": "mxfp8"},
    {"kv_cache_dtype": "fp4_mx_block16"},
    {
        "kv_cache_dtype": "nvfp4",
        "prefill_attention_backend": "flashinfer",
        "decode_attention_backend": "trtllm_mha",
    },
)
MINIMAX = Target("minimax", _MINIMAX)
MINIMAX_HISPARSE = Target("minimax hisparse", _MINIMAX, fields=_HISPARSE)
DSA_HISPARSE = DSA._replace(name="dsa hisparse", fields=_HISPARSE)

_BLOCK = {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 4,
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "target_layer_ids": [0, 2],
}
_EAGLE3 = {**TINY_LLAMA, "architectures": ["LlamaForCausalLMEagle3"]}
_NEXTN = {"num_nextn_predict_layers": 1, "architectures": ["DeepseekV3ForCausalLM"]}

EAGLE = Draft("EAGLE", "EAGLE", {**TINY_LLAMA, **_TWO_HEADS})
EAGLE3 = Draft("EAGLE3", "EAGLE3", _EAGLE3)
STANDALONE = Draft("STANDALONE", "STANDALONE", {**TINY_LLAMA, **_TWO_HEADS, **_LAYERS})
NEXTN_MLA = Draft("NEXTN mla", "EAGLE", {**TINY_MLA, **_LAYERS, **_NEXTN})
NEXTN_DSA = Draft(
    "NEXTN dsa", "EAGLE", {**TINY_DSA, **_LAYERS, "num_nextn_predict_layers": 1}
)
MULTI_LAYER = NEXTN_MLA._replace(
    name="multi-layer", fields={**_CHAIN, "enable_multi_layer_eagle": True}, runners=3
)
WINDOW_STANDALONE = Draft("STANDALONE with windows", "STANDALONE", _SWA)
WINDOW_MULTI_LAYER = MULTI_LAYER._replace(
    name="multi-layer windows", config=_WINDOW_HEADS
)
STEP_MULTI_LAYER = MULTI_LAYER._replace(name="multi-layer window", config=_STEP)
INKLING_MTP = MULTI_LAYER._replace(name="inkling depths", config=_INKLING)
INKLING_LOCAL_MTP = INKLING_MTP._replace(
    name="inkling local depths", config=_INKLING_LOCAL
)
NEXTN_WINDOWS = Draft("NEXTN mla windows", "EAGLE", _DOTS)
DFLASH = Draft("DFLASH", "DFLASH", {**TINY_LLAMA, **_BLOCK})
# One token more than its block of four drafts.
DSPARK = Draft(
    "DSPARK",
    "DSPARK",
    {**TINY_LLAMA, **_TWO_HEADS, **_BLOCK},
    fields={**_CHAIN, "speculative_num_draft_tokens": 5},
)
