"""The real configurators, pools and allocator of a published launch command, for rank 0.

Every tensor that they make is a meta tensor: it has its shape and no bytes, so a pool of a hundred
gigabytes is built with the rows that it would have. Free GPU memory is the request's; weights are
not loaded, so what a loaded model alone knows (a KV dtype that its checkpoint sets) is not seen.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from kvgeom.deployment.arguments import Stopped, taken
from kvgeom.deployment.spec import Request


class OnMeta(TorchFunctionMode):
    """Makes on the meta device what code inside it makes on a named device by its shape."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and func is not torch.tensor:
            kwargs["device"] = "meta"
        kwargs.pop("pin_memory", None)
        if func is torch.cat and any(part.is_meta for part in args[0]):
            args = ([part.to("meta") for part in args[0]], *args[1:])
        return func(*args, **kwargs)


@contextmanager
def memory(request: Request):
    """Inside, this much GPU memory is free, on every GPU, and pools take none of it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import get_parallel

    module = "sglang.srt.mem_cache.kv_cache_configurator"
    free = request.gpu_memory - request.weights
    least = []

    def smallest(tokens: torch.Tensor, **kwargs) -> None:
        least.append(tokens.item())
        tokens.fill_(min(least))

    with (
        patch.object(torch.distributed, "all_reduce", smallest),
        patch(f"{module}.get_available_gpu_memory", lambda *args, **kwargs: free),
        get_parallel().override(world_group=SimpleNamespace(cpu_group=None)),
        # It copies the first row onto itself, to compile the kernel.
        patch.object(MHATokenToKVPool, "_init_kv_copy_and_warmup", lambda self: None),
        OnMeta(),
    ):
        yield


def runners(server_args, request: Request) -> list[SimpleNamespace]:
    """What the ModelRunner of the target has after its pools are made, then those of the draft.

    With pipeline stages, of the last one, which the draft shares; the stages' smallest token count
    is that of all. Stopped where the command is for a kind of model or server that is not planned.
    """
    from sglang.srt.runtime_context import get_parallel, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    check_planned(server_args)
    with memory(request):
        for stage in range(get_parallel().pp_size):
            with _pipeline_stage(stage):
                target = _runner(server_args, request, algorithm)
        drafts = [
            _runner(server_args, request, algorithm, target, index)
            for index in _draft_indices(algorithm)
        ]
    return [target, *drafts]


@contextmanager
def _pipeline_stage(rank: int):
    """Inside, this is a GPU of that stage."""
    from sglang.srt.runtime_context import get_parallel

    group = SimpleNamespace(rank_in_group=rank, world_size=get_parallel().pp_size)
    with get_parallel().override(pp_rank=rank, pp_group=group):
        yield


def check_planned(server_args) -> None:
    """Stopped for a server whose pools are made in a way that `runners` does not follow."""
    from sglang.srt.arg_groups.overrides import post_capture_kv_sizing_planned
    from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule

    reasons = {
        "prefill context parallelism": get_parallel().attn_cp_size > 1,
        "--enable-unified-memory": get_memory().enable_unified_memory,
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": post_capture_kv_sizing_planned(server_args),
        "--prefill-only-disable-kv-cache": get_schedule().prefill_only_disable_kv_cache,
    }
    for what, found in reasons.items():
        if found:
            raise Stopped("kvgeom", f"a plan does not cover {what}")


def _draft_indices(algorithm) -> list[int | None]:
    """The index of each runner of the draft; a draft whose pool no loc indexes has none here."""
    from sglang.srt.runtime_context import get_spec

    if algorithm.is_none() or algorithm.is_ngram() or algorithm.is_frozen_kv_mtp():
        return []
    if get_spec().speculative_algorithm == "UNO":
        return []
    if get_spec().enable_multi_layer_eagle:
        return list(range(get_spec().speculative_num_steps))
    return [None]


def _runner(
    server_args, request: Request, algorithm, target=None, index: int | None = None
) -> SimpleNamespace:
    """One runner; with `target`, of the draft that shares its allocator and rows. `index`: which of
    a multi-layer draft's."""
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_executor.model_runner_components import (
        layer_setup,
        load_model_utils,
        spec_aux_hidden_state,
    )
    from sglang.srt.runtime_context import get_model, get_parallel, get_schedule, get_spec

    is_draft = target is not None
    pipeline = get_parallel().pp_group if not is_draft else SimpleNamespace(world_size=1)
    shared = target or SimpleNamespace(
        req_to_token_pool=None, token_to_kv_pool_allocator=None, memory_pool_config=None
    )
    config = ModelConfig.from_server_args(
        server_args,
        model_path=get_spec().speculative_draft_model_path if is_draft else get_model().model_path,
        is_draft_model=is_draft,
        context_length=target.model_config.context_len if is_draft else None,
    )
    if config.is_encoder_decoder:
        what = f"encoder-decoder models ({config.model_path})"
        raise Stopped("kvgeom", f"a plan does not cover {what}")
    dtype_name, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=config.dtype,
        is_draft_worker=is_draft,
        is_dflash=algorithm.is_dflash_family(),
        speculative_draft_attention_backend=get_spec().speculative_draft_attention_backend,
        speculative_draft_kv_cache_dtype=get_spec().speculative_draft_kv_cache_dtype,
    )
    configurator = taken(
        KVCacheConfigurator,
        device="cpu",  # where OnMeta finds the code that makes tensors
        gpu_id=0,
        attn_dp_size=get_parallel().attn_dp_size,
        pp_size=pipeline.world_size,
        pp_group=pipeline,
        model=None,
        model_config=config,
        server_args=server_args,
        kv_cache_dtype=dtype,
        kv_cache_dtype_str=dtype_name or get_model().kv_cache_dtype,
        model_dtype=config.dtype,
        page_size=get_schedule().page_size,
        sliding_window_size=load_model_utils.resolve_sliding_window_size(None, config),
        spec_algorithm=algorithm,
        is_draft_worker=is_draft,
        post_capture_kv_active=False,
        spec_aux_config=spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
            server_args=server_args,
            model_config=config,
            spec_algorithm=algorithm,
            is_draft_worker=is_draft,
        ),
        is_hybrid_swa=config.is_hybrid_swa,
        is_hybrid_swa_compress=config.is_hybrid_swa_compress,
        use_mla_backend=config.attention_arch == AttentionArch.MLA,
        layer_info=layer_setup.resolve_layer_indices(
            model=_layers(config, pipeline),
            model_config=config,
            is_draft_worker=is_draft,
            draft_model_idx=index,
        ),
        forward_stream=None,
        req_to_token_pool=shared.req_to_token_pool,
        token_to_kv_pool_allocator=shared.token_to_kv_pool_allocator,
        memory_pool_config=shared.memory_pool_config,
        draft_model_idx=index,
    )
    made = configurator.configure(pre_model_load_memory=request.gpu_memory)
    return SimpleNamespace(
        configurator=configurator,
        model_config=config,
        max_total_num_tokens=made.max_total_num_tokens,
        max_running_requests=made.max_running_requests,
        memory_pool_config=made.memory_pool_config,
        req_to_token_pool=made.req_to_token_pool,
        token_to_kv_pool=made.token_to_kv_pool,
        spec_algorithm=algorithm,
        token_to_kv_pool_allocator=made.token_to_kv_pool_allocator,
        use_mla_backend=configurator.use_mla_backend,
    )


def _layers(config, pipeline: SimpleNamespace) -> SimpleNamespace:
    """What a loaded model says of the layers that this stage has."""
    from sglang.srt.distributed.utils import get_pp_indices

    if pipeline.world_size == 1:
        return SimpleNamespace()
    start, end = get_pp_indices(
        config.num_hidden_layers, pipeline.rank_in_group, pipeline.world_size
    )
    return SimpleNamespace(start_layer=start, end_layer=end)
