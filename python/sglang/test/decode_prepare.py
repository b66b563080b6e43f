"""SGLang's real prepare-for-decode on CPU.

The row write is a Triton kernel: set TRITON_INTERPRET=1 before triton is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from array import array
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple, Sequence
from unittest.mock import patch

import torch

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_schedule, get_spec
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import dflash_info_v2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import spec_prepare_for_decode
from sglang.test.kv_cache_families import is_unified
from sglang.test.kv_pools import build_with
from sglang.test.row_builders import MODEL_CONFIG

GUARD = -7
# The modules whose prepare allocates, as far as this SGLang has them.
PREPARES = tuple(
    importlib.import_module(name)
    for name in (
        "sglang.srt.speculative.dflash_info_v2",
        "sglang.srt.speculative.eagle_utils",
        "sglang.srt.speculative.uno_info",
    )
    if importlib.util.find_spec(name)
)


def guard_rows(rows: ReqToTokenPool, *, count: int = 8) -> torch.Tensor:
    """Move the pool's table into a taller one and return that: a flat write past
    the last row, which the first request owns, then lands in a guard row."""
    height, width = rows.req_to_token.shape
    whole = torch.full((height + count, width), GUARD, dtype=torch.int32)
    rows.req_to_token = whole[:height]
    return whole


def tree_cache(
    rows: ReqToTokenPool, allocator: BaseTokenToKVPoolAllocator
) -> UnifiedRadixCache:
    return UnifiedRadixCache(
        CacheInitParams(
            disable=True,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=allocator.page_size,
            tree_components=(ComponentType.FULL,),
        )
    )


def new_req(rid: str, input_len: int, *, max_new_tokens: int = 1 << 20) -> Req:
    params = SamplingParams(
        max_new_tokens=max_new_tokens, ignore_eos=True, temperature=0
    )
    params.normalize(None)
    return Req(rid, "", array("q", [1] * input_len), params, vocab_size=1000)


def kv_holder(req: Req):
    """What has a request's row and its committed length."""
    return req.kv if hasattr(req.kv, "req_pool_idx") else req


def prefilled_batch(
    reqs: list[Req],
    rows: ReqToTokenPool,
    allocator: BaseTokenToKVPoolAllocator,
    cache: UnifiedRadixCache,
    *,
    overlap: bool = False,
) -> ScheduleBatch:
    """A batch whose prompts hold rows and KV: committed = allocated = the prompt."""
    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    batch = ScheduleBatch.init_new(
        reqs, rows, allocator, cache, MODEL_CONFIG, overlap, algorithm
    )
    for req in reqs:
        req.init_next_round_input(cache)
        end = len(req.full_untruncated_fill_ids)
        if hasattr(req, "extend_range"):
            req.set_extend_range(0, end)
        else:
            req.extend_end = end
    batch.prepare_for_extend()
    return batch


def attach_spec_info(batch: ScheduleBatch) -> None:
    """What a worker leaves on the batch; only DFLASH, DSPARK and UNO read it."""
    num_reqs = len(batch.reqs)
    if batch.spec_algorithm.is_dflash_family():
        batch.spec_info = dflash_info_v2.DFlashDraftInputV2.create_idle_input(
            torch.device("cpu")
        )
        batch.spec_info.future_indices = torch.arange(num_reqs)
    elif get_spec().speculative_algorithm == "UNO":
        from sglang.srt.speculative.uno_info import UnoDraftInput

        batch.spec_info = UnoDraftInput(
            bonus_tokens=torch.zeros(num_reqs, dtype=torch.int64),
            new_seq_lens=torch.zeros(num_reqs, dtype=torch.int64),
            forward_width=get_spec().speculative_num_draft_tokens,
        )


@cache
def _reqs_at(committed: range) -> list[SimpleNamespace]:
    # What a prepare reads of a request; of this it changes the step count alone.
    return [
        SimpleNamespace(
            kv=SimpleNamespace(kv_committed_len=n, kv_allocated_len=n),
            kv_committed_len=n,
            decode_batch_idx=0,
            sampling_params=SimpleNamespace(top_k=1),
        )
        for n in committed
    ]


def allocated_ends(committed: range, *, page_size: int) -> list[int]:
    """Where the real prepare of a speculative algorithm ends each request's KV on an
    allocator of `page_size`. Nothing is allocated or written."""
    reqs = _reqs_at(committed)
    wide = SimpleNamespace(req_to_token=torch.empty((1, 1 << 24), device="meta"))
    batch = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.from_string(
            get_spec().speculative_algorithm
        ),
        reqs=reqs,
        batch_size=lambda: len(reqs),
        maybe_evict_swa=lambda: None,
        sampling_info=SimpleNamespace(
            penalizer_orchestrator=SimpleNamespace(is_required=False)
        ),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page_size),
        req_to_token_pool=wide,
        tree_cache=None,
        req_pool_indices=None,
        seq_lens_cpu=torch.empty(len(reqs)),
        device="cpu",
    )
    attach_spec_info(batch)
    ends: list[int] = []

    def record(*args, nxt_kv_lens_cpu, **kwargs):
        ends.extend(nxt_kv_lens_cpu.tolist())

    with contextlib.ExitStack() as stack:
        for module in PREPARES:
            stack.enter_context(patch.object(module, "alloc_for_spec_decode", record))
        spec_prepare_for_decode(batch)
    return ends


class Prepared(NamedTuple):
    """What one real prepare, and the release after it, did."""

    end: int  # tokens the longest request was allocated to
    spilled: int  # entries of other rows that changed
    lost: int  # slots allocated and not freed again


def prepare_and_release(
    rows: ReqToTokenPool,
    allocator: BaseTokenToKVPoolAllocator,
    committed: Sequence[int],
) -> Prepared:
    """Prefill one request to each of `committed`, prepare a decode step, release."""
    whole = guard_rows(rows)
    cache = tree_cache(rows, allocator)
    taken = _num_taken(allocator)
    reqs = [new_req(f"r{i}", n) for i, n in enumerate(committed)]
    batch = prefilled_batch(reqs, rows, allocator, cache)
    attach_spec_info(batch)
    before = whole.clone()
    batch.prepare_for_decode()
    ends = [req.kv.kv_allocated_len for req in reqs]
    for req, start, end in zip(reqs, committed, ends):
        # A request may change its own columns past its prompt, and nothing else.
        row = kv_holder(req).req_pool_idx
        before[row, start:end] = whole[row, start:end]
    spilled = int((whole != before).sum())
    for req in reqs:
        req.finished_reason = object()
        build_with(release_kv_cache, req=req, tree_cache=cache, checkpoint=False)
    return Prepared(end=max(ends), spilled=spilled, lost=_num_taken(allocator) - taken)


def rebuild_compact_rows(
    rows: ReqToTokenPool,
    *,
    row: int,
    seq_lens: torch.Tensor,
    draft_tokens: int,
    window: int,
    triton: bool,
) -> None:
    """The real rebuild of a compact DFLASH draft's row, on a worker with no model."""
    worker = object.__new__(DFlashWorkerV2)
    table = torch.arange(5 * 4096, dtype=torch.int32).reshape(5, 4096)
    worker.__dict__.update(
        draft_window_size=window,
        page_size=get_schedule().page_size,
        device="cpu",
        _use_triton_compact_rebuild=triton,
        _draft_block_end_buf=torch.zeros(8, dtype=torch.int32),
        draft_model_runner=SimpleNamespace(req_to_token_pool=rows),
        model_runner=SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=table)
        ),
    )
    worker._rebuild_compact_draft_cache(
        req_pool_indices=torch.tensor([row]),
        prefix_lens=seq_lens,
        draft_prefix_lens=worker._compute_compact_draft_seq_lens(seq_lens),
        verify_out_cache_loc_2d=torch.full((1, draft_tokens), 9999),
        bs=1,
        block_size=draft_tokens,
    )


def _num_taken(allocator: BaseTokenToKVPoolAllocator) -> int:
    """Slots that requests hold, up to a constant."""
    if is_unified(allocator):
        # Its free count also moves with the states that share its bytes.
        return allocator.full_attn_allocator.allocated_count()
    return -allocator.available_size()
