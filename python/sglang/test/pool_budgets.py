"""A target and its draft, budgeted and built by the real configurators on CPU."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import shutil
from types import SimpleNamespace
from typing import Iterator, NamedTuple, Optional
from unittest.mock import patch

import torch

import sglang.srt.utils.common as common
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import (
    KVCacheConfigResult,
    KVCacheConfigurator,
)
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    KVCache,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.model_runner_components.layer_setup import (
    resolve_layer_indices,
)
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.model_executor.pool_configurator import (
    create_memory_pool_configurator,
)
from sglang.srt.runtime_context import (
    get_model,
    get_schedule,
    get_server_args,
    get_spec,
)
from sglang.srt.speculative import draft_worker_common
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.budget_servers import Draft, Target
from sglang.test.draft_configurator import configurator, write_config
from sglang.test.kv_cache_families import topology
from sglang.test.kv_pools import OnCPU, build_with

BUDGET = 1 << 23
STATES = 8
_FP4 = torch.float4_e2m1fn_x2


class _OnCPU(OnCPU):
    """FP4 too, of which torch fills none on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.zeros and kwargs.get("dtype") == _FP4:
            func = torch.empty
        return super().__torch_function__(func, types, args, kwargs)


class Built(NamedTuple):
    """`charged`: bytes that the budget takes for the tokens of `target`;
    `budget`: the class of its pool configurator."""

    charged: int
    budget: str
    target: KVCacheConfigResult
    drafts: list[KVCacheConfigResult]

    @property
    def pools(self) -> list[KVCache]:
        """Of target and drafts, what holds tensors of its own."""
        results = list(self.drafts)
        if self.target.unified_memory_pool is None:
            results.append(self.target)
        return [leaf for result in results for leaf in leaves(result.token_to_kv_pool)]

    @property
    def allocated(self) -> int:
        unified = self.target.unified_memory_pool
        return sum(map(pool_bytes, self.pools)) + (
            unified.total_bytes if unified else 0
        )


def build(target: Target, draft: Optional[Draft], *, dcp_size: int) -> Built:
    """`target` and `draft` under a budget of `BUDGET` bytes, at TP8."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            topology(
                dcp_size,
                target.page_size,
                max_running_requests=2,
                **{"attention_backend": "triton", **model_fields(target, draft)},
            )
        )
        stack.enter_context(get_schedule().override(max_mamba_cache_size=STATES))
        stack.enter_context(_OnCPU())
        # FP4 is CUDA's alone.
        stack.enter_context(patch.object(common, "is_cuda", lambda: True))
        # It copies the first row onto itself, to compile the kernel.
        stack.enter_context(
            patch.object(
                MHATokenToKVPool, "_init_kv_copy_and_warmup", lambda self: None
            )
        )
        runner = _configurator(_folder(target), draft and draft.algorithm)
        return _build(runner, draft)


def model_fields(target: Target, draft: Optional[Draft]) -> dict:
    """The server arguments of the two, their model folders among them."""
    fields = {"model_path": _folder(target), **target.fields}
    if draft is not None:
        fields |= {
            "speculative_algorithm": draft.algorithm,
            "speculative_draft_model_path": _folder(draft),
            **draft.fields,
        }
    return fields


def _build(runner: KVCacheConfigurator, draft: Optional[Draft]) -> Built:
    profiled = patch.object(
        KVCacheConfigurator, "_profile_available_bytes", lambda *args: BUDGET
    )
    with profiled:
        target = runner.configure(pre_model_load_memory=1)
    budget = create_memory_pool_configurator(runner)
    if target.unified_memory_pool is None:
        charged = int(budget._cell_size * target.max_total_num_tokens)
        if "_swa_cap" in vars(budget):
            # The windows of its requests are no share of the tokens.
            charged = BUDGET
    else:
        # All of it, and the state that was profiled before.
        charged = BUDGET + _state_bytes(runner)
    runners = draft.runners if draft else 0
    if _holds_fused_draft(target):
        runners = 0
    drafts = [
        _configurator(
            _folder(draft), draft.algorithm, target=target, index=index
        ).configure(pre_model_load_memory=1)
        for index in range(runners)
    ]
    return Built(charged, type(budget).__name__, target, drafts)


def _holds_fused_draft(target: KVCacheConfigResult) -> bool:
    """Whether the target's buffer has the rows of the draft, as newer ones can."""
    if target.unified_memory_pool is None:
        return False
    buffer = target.token_to_kv_pool_allocator.unified_buffer
    return vars(buffer).get("fused_draft") is not None


def _state_bytes(runner: KVCacheConfigurator) -> int:
    if runner.mambaish_config is None:
        return 0
    state = runner.mambaish_config.mamba2_cache_params
    per_request = int(state.mamba_cache_per_req)
    if hasattr(runner, "fused_entry_bytes"):
        # With the state of a fused draft.
        per_request = runner.fused_entry_bytes("mamba") or per_request
    return per_request * STATES


def _configurator(
    model_path: str,
    algorithm: Optional[str],
    *,
    target: Optional[KVCacheConfigResult] = None,
    index: Optional[int] = None,
) -> KVCacheConfigurator:
    """As a model runner builds it; of the draft of `target` where there is one."""
    is_draft = target is not None
    model_config = ModelConfig.from_server_args(
        get_server_args(), model_path=model_path, is_draft_model=is_draft
    )
    shared = {
        "model_config": model_config,
        "spec_algorithm": SpeculativeAlgorithm.from_string(algorithm),
        "is_draft_worker": is_draft,
    }
    # No layer with a KV scale; the runners of an Inkling draft have a depth each.
    model = torch.nn.Module()
    model.layers = ()
    model.mtp_layer_id_is_depth = "Inkling" in model_config.hf_config.architectures[0]
    dtype_str, dtype = _kv_cache_dtype(**shared)
    made = configurator(
        **shared,
        pp_group=SimpleNamespace(rank_in_group=0, world_size=1),
        kv_cache_dtype=dtype,
        kv_cache_dtype_str=dtype_str or get_model().kv_cache_dtype,
        model_dtype=model_config.dtype,
        sliding_window_size=model_config.sliding_window_size,
        spec_aux_config=build_with(
            resolve_spec_aux_hidden_state_config,
            server_args=get_server_args(),
            **shared,
        ),
        is_hybrid_swa=model_config.is_hybrid_swa,
        is_hybrid_swa_compress=model_config.is_hybrid_swa_compress,
        use_mla_backend=model_config.attention_arch == AttentionArch.MLA,
        layer_info=build_with(
            resolve_layer_indices, model=model, draft_model_idx=index, **shared
        ),
        req_to_token_pool=target and target.req_to_token_pool,
        token_to_kv_pool_allocator=target and target.token_to_kv_pool_allocator,
        memory_pool_config=target and target.memory_pool_config,
        draft_model_idx=index,
    )
    made.model = model
    made.__post_init__()  # where older releases read it
    return made


def _kv_cache_dtype(
    *,
    model_config: ModelConfig,
    spec_algorithm: SpeculativeAlgorithm,
    is_draft_worker: bool,
) -> tuple[Optional[str], torch.dtype]:
    """As a model runner resolves it; the checkpoint has no KV dtype of its own."""
    spec = get_spec()
    draft_backend = spec.speculative_draft_attention_backend
    if spec_algorithm.is_dflash_family() and is_draft_worker:
        # Its worker's answer, which older releases keep to themselves.
        resolve = vars(draft_worker_common).get(
            "resolve_draft_worker_attention_backend"
        )
        draft_backend = resolve() if resolve else draft_backend
    return build_with(
        configure_kv_cache_dtype,
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=model_config.dtype,
        is_draft_worker=is_draft_worker,
        is_dflash=spec_algorithm.is_dflash_family(),
        speculative_draft_attention_backend=draft_backend,
        speculative_draft_kv_cache_dtype=vars(spec).get(
            "speculative_draft_kv_cache_dtype"
        ),
    )


def _folder(server: Target | Draft) -> str:
    return _folder_with(json.dumps(server.config))


@functools.cache
def _folder_with(config: str) -> str:
    """One for each config, as long as the process: SGLang keeps what it parsed."""
    folder = write_config(json.loads(config))
    atexit.register(shutil.rmtree, folder)
    return folder


def leaves(pool: KVCache) -> Iterator[KVCache]:
    """The pools inside `pool` that hold tensors."""
    if isinstance(pool, SWAKVPool):
        sides = (pool.full_kv_pool, pool.swa_kv_pool)
    elif isinstance(pool, HybridLinearKVPool):
        sides = (pool.full_kv_pool,)
    elif isinstance(pool, MiniMaxSparseKVPool):
        dense = vars(pool).get("dense_pool")
        sides = (pool.main_pool, dense, pool.index_kv_pool, pool.index_k_pool)
    else:
        yield pool
        return
    yield from (side for side in sides if side is not None)


def pool_bytes(pool: KVCache) -> int:
    """Bytes of every buffer of a pool from `leaves`, index keys included."""
    size = pool.get_kv_size_bytes()
    if isinstance(pool, MLATokenToKVPoolFP4):
        # SGLang counts its scales nowhere.
        size += sum(scale.nbytes for scale in pool.kv_scale_buffer)
    return int(sum(size) if isinstance(size, tuple) else size)


def page_bytes(pool: KVCache) -> int:
    """Bytes of one page of a pool from `leaves`, over its layers."""
    return math.ceil(pool_bytes(pool) * pool.page_size / (pool.size + pool.page_size))
