"""What an attention backend fills its tables from, at the longest sequence that
speculation publishes: real pools and translator, guarded buffers, batches."""

from __future__ import annotations

import contextlib
import importlib.util
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_server_args, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.kv_cache_families import topology
from sglang.test.kv_pools import build_with

REQS = 2
COMPRESS_RATIO = 4
_POOL = {
    "dtype": torch.float32,
    "layer_num": 1,
    "device": "cpu",
    "enable_memory_saver": False,
}


class Spec(NamedTuple):
    """A draft configuration. Every verify accepts at most `steps + 1` tokens."""

    steps: int
    topk: int
    draft_tokens: int

    def committed(self, ctx: int) -> int:
        # Prompt and output end at ctx - 2; a decode server launches one round
        # past ctx - 4 while the round before it is in flight.
        return ctx - 4 + self.steps + 1

    def row(self, ctx: int, page: int) -> int:
        """The narrowest row that holds what one more round writes."""
        longest = self.committed(ctx) + max(self.draft_tokens, self.steps)
        return -(-longest // page) * page

    @contextlib.contextmanager
    def published(self, page: int, **fields):
        with topology(
            1,
            page,
            tp_size=1,
            speculative_algorithm="EAGLE",
            speculative_num_steps=self.steps,
            speculative_eagle_topk=self.topk,
            speculative_num_draft_tokens=self.draft_tokens,
            **fields,
        ):
            yield


CHAIN = Spec(steps=3, topk=1, draft_tokens=4)
LONG_CHAIN = Spec(steps=5, topk=1, draft_tokens=6)
TREE = Spec(steps=5, topk=4, draft_tokens=8)


class Guards(TorchFunctionMode):
    """Puts sentinel words around every integer buffer made inside the block, and
    makes CUDA, NPU and pinned tensors on the CPU."""

    WORDS = 4096
    SENTINEL = 77
    FACTORIES = (torch.zeros, torch.empty, torch.full, torch.ones)
    DTYPES = (torch.int32, torch.int64, torch.uint8)

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).startswith(("cuda", "npu")):
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        if func not in self.FACTORIES or out.dtype not in self.DTYPES:
            return out
        whole = torch.empty(out.numel() + 2 * self.WORDS, dtype=out.dtype)
        whole.fill_(self.SENTINEL)
        inner = whole[self.WORDS : self.WORDS + out.numel()].view(out.shape)
        inner.copy_(out)
        self.buffers.append((whole, inner))
        return inner

    def overruns(self) -> list[tuple[tuple[int, ...], int, int]]:
        """(shape, words before, words after) of each buffer written outside."""
        found = []
        for whole, inner in self.buffers:
            written = whole != self.SENTINEL
            before = int(written[: self.WORDS].sum())
            after = int(written[self.WORDS + inner.numel() :].sum())
            if before or after:
                found.append((tuple(inner.shape), before, after))
        return found


def runner(
    ctx: int, row: int, page: int, *, mla: bool = False, draft: bool = False
) -> SimpleNamespace:
    """What the backends read of a ModelRunner. Request r owns its own pages."""
    reqs = ReqToTokenPool(
        size=REQS, max_context_len=row, device="cpu", enable_memory_saver=False
    )
    stride = -(-row // page) * page
    for r in range(1, REQS + 1):
        reqs.req_to_token[r] = torch.arange(row, dtype=torch.int32) + r * stride
    size = (REQS + 1) * stride
    if mla:
        pool = MLATokenToKVPool(
            size=size, page_size=page, kv_lora_rank=16, qk_rope_head_dim=8, **_POOL
        )
    else:
        pool = MHATokenToKVPool(
            size=size, page_size=page, head_num=1, head_dim=8, **_POOL
        )
    allocator = TokenToKVPoolAllocator(
        size, dtype=torch.int64, device="cpu", kvcache=pool, need_sort=False
    )
    hf_config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=1,
        indexer_compress_ratio=COMPRESS_RATIO,
    )
    config = SimpleNamespace(
        context_len=ctx,
        attention_arch=AttentionArch.MLA if mla else AttentionArch.MHA,
        hf_config=hf_config,
        hf_text_config=hf_config,
        dtype=torch.float32,
        hidden_size=32,
        head_dim=8,
        v_head_dim=8,
        swa_v_head_dim=8,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        scaling=1.0,
        num_attention_heads=4,
        get_max_num_attention_heads=lambda: 4,
        get_num_kv_heads=lambda *sizes: 1,
        is_encoder_decoder=False,
        is_local_attention_model=False,
        is_multimodal=False,
        linear_attn_registry_result=None,
    )
    translator = None
    if importlib.util.find_spec("sglang.srt.mem_cache.kv_index_translator"):
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

        translator = build_with(
            KVIndexTranslator,
            req_to_token=reqs.req_to_token,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=pool,
            page_size=page,
            device="cpu",
            is_draft_worker=draft,
        )
    parallel = {"tp_size": 1, "tp_rank": 0, "attn_cp_size": 1}
    return SimpleNamespace(
        **parallel,
        ps=SimpleNamespace(**parallel),
        req_to_token_pool=reqs,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        kv_index_translator=translator,
        model_config=config,
        server_args=get_server_args(),
        page_size=page,
        device="cpu",
        gpu_id=0,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        kv_cache_dtype_str="auto",
        is_draft_worker=draft,
        is_hybrid_swa=False,
        sliding_window_size=None,
        attention_chunk_size=None,
        max_running_requests=REQS,
        prefill_attention_backend_str="",
        decode_attention_backend_str="",
        spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE"),
        decode_num_tokens_per_req=lambda: get_spec().speculative_num_draft_tokens,
        model=torch.nn.Identity(),
        hisparse_coordinator=None,
        use_mla_backend=mla,
    )


class Batch(SimpleNamespace):
    """A forward batch; translators refer to it weakly."""


def batch(m: SimpleNamespace, length: int, mode: ForwardMode, **fields):
    """`REQS` requests of that length, without a host copy of the lengths."""
    spec = get_spec().speculative_num_draft_tokens
    topk = get_spec().speculative_eagle_topk
    rows = topk if mode.is_decode() else spec
    lens = torch.full((REQS,), length, dtype=torch.int64)
    out = Batch(
        batch_size=REQS,
        forward_mode=mode,
        req_pool_indices=torch.arange(1, REQS + 1),
        seq_lens=lens,
        seq_lens_cpu=None,
        seq_lens_sum=None,
        positions=lens.repeat_interleave(rows),
        input_ids=torch.zeros(REQS * spec, dtype=torch.int64),
        out_cache_loc=None,
        encoder_lens=None,
        encoder_out_cache_loc=None,
        spec_info=SimpleNamespace(
            num_tokens_per_req=spec,
            draft_token_num=spec,
            custom_mask=None,
            positions=torch.arange(REQS * spec),
            ragged_verify_layout=None,
            spec_input_type=None,
        ),
        extend_seq_lens=torch.full((REQS,), spec, dtype=torch.int64),
        extend_seq_lens_cpu=[spec] * REQS,
        extend_prefix_lens=lens - spec,
        extend_prefix_lens_cpu=None,
        kv_loc_plan=None,
        kv_loc_cols=None,
        ragged_verify_layout=None,
        mm_inputs=None,
        max_seq_len_override=None,
        attn_cp_metadata=None,
    )
    out.__dict__.update(fields)
    if hasattr(m.kv_index_translator, "own_plan"):
        out.kv_loc_plan = m.kv_index_translator.own_plan(out)
    return out


def absent_pages(m: SimpleNamespace, table: torch.Tensor, length: int) -> list[int]:
    """Pages of each request's first `length` tokens that its row lacks."""
    page = m.page_size
    need = -(-length // page)
    rows = m.req_to_token_pool.req_to_token[1 : REQS + 1, : need * page : page] // page
    return [
        need - int((have[:need] == want[: have.numel()]).sum())
        for want, have in zip(rows, table)
    ]
