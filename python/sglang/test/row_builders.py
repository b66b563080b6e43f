"""req_to_token rows and their allocators, from the real builders, on CPU."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Callable, Iterator, NamedTuple, Optional

import torch

from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import (
    get_disagg,
    get_parallel,
    get_schedule,
    get_server_args,
    get_spec,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.kv_cache_families import topology
from sglang.test.kv_pools import OnCPU, swa_pool

MODEL_CONFIG = SimpleNamespace(
    is_encoder_decoder=False,
    vocab_size=1000,
    self_opened_think_start_ids=None,
    think_end_ids=None,
    hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
)


class Shape(NamedTuple):
    """What --speculative-* resolves to; all None without speculation."""

    algorithm: Optional[str] = None
    steps: Optional[int] = None
    topk: Optional[int] = None
    draft_tokens: Optional[int] = None


def known(*shapes: Shape) -> list[Shape]:
    """Those whose algorithm this SGLang has."""
    names = (None, *SpeculativeAlgorithm.__members__)
    return [shape for shape in shapes if shape.algorithm in names]


@contextlib.contextmanager
def configured(shape: Shape, *, page_size: int, dcp_size: int = 1) -> Iterator[None]:
    """Publish `shape`, with the pages of one server."""
    fields = {"attention_backend": "triton", **_spec_fields(shape)}
    with (
        topology(dcp_size, page_size, tp_size=1, **fields),
        get_schedule().override(max_mamba_cache_size=8),
    ):
        yield


@contextlib.contextmanager
def reshaped(shape: Shape) -> Iterator[None]:
    """As `configured` with the pages that are published: cheaper than a publish."""
    if not hasattr(runtime_context, "max_speculative_num_draft_tokens"):
        # This SGLang reads the shape off its arguments.
        dcp_size = get_parallel().attn_dcp_size
        with configured(shape, page_size=get_schedule().page_size, dcp_size=dcp_size):
            yield
        return
    leaves = _spec_fields(shape)
    if "max_speculative_num_draft_tokens" in get_spec():
        leaves["max_speculative_num_draft_tokens"] = shape.draft_tokens
    with get_spec().override(**leaves):
        yield


def _spec_fields(shape: Shape) -> dict:
    return {
        "speculative_algorithm": shape.algorithm,
        "speculative_num_steps": shape.steps,
        "speculative_eagle_topk": shape.topk,
        "speculative_num_draft_tokens": shape.draft_tokens,
    }


@functools.cache
def _mamba_params() -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=8,
        n_groups=1,
        num_heads=1,
        head_dim=8,
        state_size=8,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return Mamba2CacheParams(shape=shape, dtype=dtype, layers=[0])


def target_configurator(
    context_len: int, *, swa: bool = False, mamba: bool = False, mla: bool = False
) -> KVCacheConfigurator:
    """A real configurator of a target with two tiny layers, as its builders read
    it; no model is loaded, so its constructor is not run."""
    configurator = object.__new__(KVCacheConfigurator)
    model_config = SimpleNamespace(
        context_len=context_len,
        head_dim=8,
        v_head_dim=8,
        swa_head_dim=8,
        swa_v_head_dim=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        sliding_window_size=32,
        get_num_kv_heads=lambda *a: 1,
        get_swa_num_kv_heads=lambda *a: 1,
        hf_config=MODEL_CONFIG.hf_config,
        hf_text_config=SimpleNamespace(),
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
    )
    mamba_config = SimpleNamespace(
        mamba2_cache_params=_mamba_params(), full_attention_layer_ids=[1]
    )
    attributes = {
        "device": "cpu",
        "ps": SimpleNamespace(attn_dp_size=1, pp_size=1),
        "server_args": get_server_args(),
        "model_config": model_config,
        "mambaish_config": mamba_config if mamba else None,
        "hybrid_gdn_config": None,
        "hybrid_kda_config": None,
        "is_draft_worker": False,
        "page_size": get_schedule().page_size,
        "token_to_kv_pool_allocator": None,
        "kv_shard_size": 1,
        "layer_info": SimpleNamespace(
            start_layer=0,
            end_layer=2,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
        ),
        "kv_cache_dtype": torch.float16,
        "use_mla_backend": mla,
        "is_hybrid_swa": swa,
        "is_hybrid_swa_compress": False,
        # Unified pools refuse an EAGLE draft that they cannot fuse.
        "spec_algorithm": SpeculativeAlgorithm.NONE,
        "spec_aux_config": SimpleNamespace(
            draft_model_config=None, dflash_draft_num_layers=None
        ),
        "forward_stream": None,
        "post_capture_kv_active": False,
    }
    for name in attributes.keys() & KVCacheConfigurator.__dataclass_fields__.keys():
        setattr(configurator, name, attributes[name])
    return configurator


Built = tuple[ReqToTokenPool, BaseTokenToKVPoolAllocator]


# For one allocator at a time: each registers its own mapping.
_swa_pool = functools.cache(swa_pool)


def _separate(configurator: KVCacheConfigurator, tokens: int, reqs: int) -> Built:
    """Rows, then the allocator beside them, as `_init_pools` builds a target's."""
    rows = configurator._build_req_to_token_pool(max_num_reqs=reqs)
    pool = None
    if configurator.is_hybrid_swa:
        pool = _swa_pool(tokens, tokens, get_schedule().page_size)
    sizes = SimpleNamespace(
        max_total_num_tokens=tokens,
        full_max_total_num_tokens=tokens,
        swa_max_total_num_tokens=tokens,
    )
    allocator = configurator._build_token_to_kv_pool_allocator(
        sizes=sizes,
        token_to_kv_pool=pool,
        is_dsv4_model=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=None,
    )
    return rows, allocator


def _plain(context_len: int, tokens: int, reqs: int) -> Built:
    return _separate(target_configurator(context_len), tokens, reqs)


def _swa(context_len: int, tokens: int, reqs: int) -> Built:
    return _separate(target_configurator(context_len, swa=True), tokens, reqs)


def _mamba(context_len: int, tokens: int, reqs: int) -> Built:
    with OnCPU():
        return _separate(target_configurator(context_len, mamba=True), tokens, reqs)


def _decode(build: Callable[[int, int, int], Built]):
    def built(context_len: int, tokens: int, reqs: int) -> Built:
        with get_disagg().override(
            disaggregation_mode="decode", disaggregation_decode_extra_slots=2
        ):
            return build(context_len, tokens, reqs)

    return built


def _unified_mamba(context_len: int, tokens: int, reqs: int) -> Built:
    configurator = target_configurator(context_len, mamba=True, mla=True)
    with OnCPU():
        bundle = configurator._init_unified_mamba_pools(
            max_num_reqs=reqs, max_total_num_tokens=tokens
        )
    return bundle.req_to_token_pool, bundle.token_to_kv_pool_allocator


def _unified_swa(context_len: int, tokens: int, reqs: int) -> Built:
    bundle = target_configurator(context_len, swa=True)._init_unified_swa_pools(
        max_num_reqs=reqs,
        full_max_total_num_tokens=tokens,
        swa_max_total_num_tokens=tokens,
    )
    return bundle.req_to_token_pool, bundle.token_to_kv_pool_allocator


def _unified_mamba_swa(context_len: int, tokens: int, reqs: int) -> Built:
    configurator = target_configurator(context_len, swa=True, mamba=True)
    with OnCPU():
        bundle = configurator._init_unified_mamba_swa_pools(
            max_num_reqs=reqs,
            full_max_total_num_tokens=tokens,
            swa_max_total_num_tokens=tokens,
        )
    return bundle.req_to_token_pool, bundle.token_to_kv_pool_allocator


# name -> build(context_len, tokens per rank, requests)
BUILDERS: dict[str, Callable[[int, int, int], Built]] = {
    "plain": _plain,
    "decode": _decode(_plain),
    "hybrid mamba": _mamba,
    "hybrid mamba decode": _decode(_mamba),
    "swa": _swa,
    "unified mamba": _unified_mamba,
    "unified swa": _unified_swa,
}
if hasattr(KVCacheConfigurator, "_init_unified_mamba_swa_pools"):
    BUILDERS["unified mamba swa"] = _unified_mamba_swa
