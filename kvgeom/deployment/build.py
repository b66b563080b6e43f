"""One tree's answer to a launch command: runs in the child, on the tree that it imports."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from unittest.mock import patch

from kvgeom import series
from kvgeom.cpu_engine import interpreter
from kvgeom.cpu_engine.parent import sglang_release
from kvgeom.deployment import tables
from kvgeom.deployment.arguments import Stopped, gpu, published
from kvgeom.deployment.spec import Request, RowUse, Server, Stop, TreePlan

_IMPORTS = (
    "sglang.srt.server_args",
    "sglang.srt.mem_cache.kv_cache_configurator",
    "sglang.srt.model_executor.pool_configurator",
    "sglang.srt.arg_groups.pipeline",
)
_HICACHE = {"--enable-hierarchical-cache", "--enable-hicache"}
# What SGLang refuses with. Another type means that what stands in for a GPU did not hold.
_REFUSALS = (ValueError, NotImplementedError, AssertionError, RuntimeError)


def preload(requests: list[Request]) -> None:
    """Import what the plans need, once for all of them."""
    for name in _IMPORTS:
        importlib.import_module(name)
    capacity = any(r.capacity for r in requests)
    words = {word for request in requests for word in request.arguments}
    if _HICACHE & words:
        importlib.import_module("sglang.srt.models.registry")  # every model
    if capacity or any(word.startswith("--speculative") for word in words):
        _use_series_tests()
    if capacity:
        importlib.import_module("sglang.test.pool_budgets")


def plan(request: Request) -> TreePlan:
    """Parse, resolve, build, read. Whatever ends it early is in the answer's `stop`."""
    release = sglang_release()
    try:
        return (_sized if request.capacity else _planned)(request, release)
    except Stopped as stopped:
        return TreePlan(release, stop=stopped.stop)
    except Exception as error:
        traceback.print_exc()
        return TreePlan(release, stop=_stop(error))


def _planned(request: Request, release: str) -> TreePlan:
    with gpu(request):
        from sglang.srt.runtime_context import get_memory

        from kvgeom.deployment import hosts, pools, structures

        args = published(request)
        settings = _settings()
        try:
            target, *drafts = pools.runners(args, request)
            built = structures.geometry(target, drafts)
            if get_memory().enable_hierarchical_cache:
                with pools.memory(request):
                    built.pools.extend(hosts.measure(args, target, drafts))
        except Stopped as stopped:
            return TreePlan(release, stop=stopped.stop, settings=settings)
        except _REFUSALS as error:
            traceback.print_exc()
            return TreePlan(release, stop=_stop(error), settings=settings)
        server = _server(target)
        if server is not None:
            _use_series_tests()
        return TreePlan(
            release,
            settings=settings | {"max_running_requests": target.max_running_requests},
            geometry=built,
            row_use=_row_use(target),
            tables=tables.measure(server) if server else [],
            tokens=target.max_total_num_tokens,
            not_planned=_not_planned(server),
        )


def _sized(request: Request, release: str) -> TreePlan:
    """Only how much fits."""
    with gpu(request):
        from kvgeom.deployment import capacity, pools

        args = published(request)
        made = pools.runners(args, request)
        with pools.memory(request):
            found = capacity.measure(made)
        tokens = made[0].max_total_num_tokens
        return TreePlan(release, settings=_settings(), tokens=tokens, capacity=found)


def _stop(error: Exception) -> Stop:
    kind = type(error).__name__
    message = str(error).strip() or kind
    if kind == "PageGeometryError":
        return Stop("assertion", kind, message)
    frames = traceback.extract_tb(error.__traceback__)
    raised_in_sglang = "sglang" in Path(frames[-1].filename).parts
    if isinstance(error, _REFUSALS) and raised_in_sglang:
        return Stop("sglang", kind, message)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    told = f"SGLang's code could not be run without a GPU: {kind} at {where}: {message}"
    return Stop("kvgeom", kind, told)


def _settings() -> dict[str, str | int | float | None]:
    """Resolved arguments that the geometry follows from, by SGLang's names."""
    from sglang.srt.runtime_context import (
        attention_backends,
        get_memory,
        get_model,
        get_parallel,
        get_schedule,
        get_spec,
    )

    prefill, decode = attention_backends()
    spec = get_spec()
    return {
        "model_path": get_model().model_path,
        "tp_size": get_parallel().tp_size,
        "dcp_size": get_parallel().attn_dcp_size,
        "page_size": get_schedule().page_size,
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
        "kv_cache_dtype": get_model().kv_cache_dtype,
        "mem_fraction_static": get_schedule().mem_fraction_static,
        "enable_hierarchical_cache": get_memory().enable_hierarchical_cache,
        "speculative_algorithm": spec.speculative_algorithm,
        "speculative_draft_model_path": spec.speculative_draft_model_path,
        "speculative_num_steps": spec.speculative_num_steps,
        "speculative_eagle_topk": spec.speculative_eagle_topk,
        "speculative_num_draft_tokens": spec.speculative_num_draft_tokens,
    }


def _server(target) -> Server | None:
    """What its attention tables follow from; None without speculation."""
    from sglang.srt.runtime_context import attention_backends, get_parallel, get_schedule, get_spec

    spec = get_spec()
    if spec.speculative_algorithm is None:
        return None
    decode = attention_backends()[1]
    return Server(
        algorithm=spec.speculative_algorithm,
        steps=spec.speculative_num_steps,
        topk=spec.speculative_eagle_topk,
        draft_tokens=spec.speculative_num_draft_tokens,
        context=target.model_config.context_len,
        row=target.req_to_token_pool.req_to_token.shape[1],
        page=get_schedule().page_size,
        dcp_size=get_parallel().attn_dcp_size,
        mla=target.use_mla_backend,
        window=target.model_config.is_hybrid_swa,
        multi_layer=spec.enable_multi_layer_eagle,
        target=decode,
        draft=spec.speculative_draft_attention_backend or decode,
    )


def _not_planned(server: Server | None) -> list[str]:
    """Structures that a server of this command has and that are not looked at."""
    from sglang.srt.runtime_context import get_parallel

    found = tables.missing(server) if server else []
    if server and get_parallel().pp_size > 1:
        found.append("how far the loop of pipeline stages decodes")
    return found


def _row_use(target) -> RowUse:
    """From the real prepare of a decode step, at the lengths that end near the context length."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    context = target.model_config.context_len
    if get_spec().speculative_algorithm is None:
        return RowUse(committed=context, reserve=1, ends_at=context)
    from sglang.test.decode_prepare import allocated_ends
    from sglang.test.kv_pools import build_with

    page = target.token_to_kv_pool_allocator.page_size
    reserve = build_with(get_alloc_reserve_per_decode, page_size=page)
    last = context - 4  # test_decode_commit_bound: no loop decodes a longer request again
    lengths = range(max(1, last - reserve - 2 * page), last + 1)
    ends = allocated_ends(lengths, page_size=page)
    width = target.req_to_token_pool.req_to_token.shape[1]
    past = [n for n, end in zip(lengths, ends, strict=True) if end > width]
    return RowUse(last, reserve, max(ends), past[0] if past else None)


def _use_series_tests() -> None:
    """Lets `sglang.test` find the series' test modules in a tree that it is not applied to."""
    import sglang.test

    ours = str(series.find_root() / "python/sglang/test")
    if ours in sglang.test.__path__:
        return
    sglang.test.__path__.append(ours)
    # sglang.test.test_utils takes the first digit of what hides the GPUs of this machine.
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="0"):
        importlib.import_module("sglang.test.attention_backends")
    importlib.import_module("sglang.test.decode_prepare")
    interpreter.quicken(sglang_release())
