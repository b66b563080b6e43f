"""Bounds that follow the row's width, and those that stay at the context length."""

import os
import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

os.environ["TRITON_INTERPRET"] = "1"

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

import torch

from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
    KVCacheAttentionAccess,
    KVCacheAttentionAccessKind,
    KVCacheBackendMatcher,
)
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_utils, eagle_worker_common
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.test.attention_backends import (
    BACKENDS,
    AttentionTableCase,
    build,
    module,
)
from sglang.test.attention_tables import CHAIN, REQS, TREE, Guards, batch, runner
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

CTX = 48
VERIFY = ForwardMode.TARGET_VERIFY
DRAFT = CHAIN.draft_tokens
ROW_WIDE = (
    "triton",
    "fa",
    "flashinfer",
    "flashinfer_mla",
    "trtllm_mha",
    "trtllm_mla",
    "cutedsl_mla",
    "tokenspeed_mla",
    "flashmla",
    "aiter",
    "xpu",
    "wave",
    "qsa",
    "ascend",
)
MINIMAX = {
    "sparse_attention_freq": [0, 1],
    "sparse_index_dim": 128,
    "sparse_block_size": 128,
    "sparse_topk_blocks": 16,
    "sparse_num_index_heads": 4,
    "sparse_init_block": 0,
    "sparse_local_block": 1,
}


class Called(Exception):
    """Raised by a stand-in, once its arguments are known."""


class TestTreeMaskBounds(AttentionTableCase):
    """Without host lengths and without a preallocated mask, the row is the bound."""

    def inputs(self, m):
        b = batch(m, TREE.committed(CTX), VERIFY)
        b.forward_mode = SimpleNamespace(is_idle=lambda: False)
        b.req_to_token_pool = m.req_to_token_pool
        b.spec_info = SimpleNamespace(bonus_tokens=torch.zeros(REQS, dtype=torch.int64))
        model_runner = SimpleNamespace(
            attn_backend=SimpleNamespace(verify_mask=None, max_context_len=CTX),
            model_config=m.model_config,
        )
        return b, SimpleNamespace(model_runner=model_runner)

    def bound(self, owner, call):
        kernel = MagicMock(side_effect=Called)
        with patch.object(owner, "build_tree_kernel_efficient", kernel):
            with self.assertRaises(Called):
                call()
        return kernel.call_args.args[5]

    def test_tree_mask_of_a_draft(self):
        with self.case(TREE, CTX, 1) as m:
            b, worker = self.inputs(m)
            bound = self.bound(
                eagle_worker_common,
                lambda: eagle_worker_common.build_eagle_verify_input(
                    b,
                    b.spec_info,
                    None,
                    None,
                    torch.zeros(REQS, TREE.draft_tokens - 1),
                    None,
                    target_worker=worker,
                    topk=TREE.topk,
                    num_steps=TREE.steps,
                    num_draft_tokens=TREE.draft_tokens,
                    tree_mask_mode=TreeMaskMode.FULL_MASK,
                    device="cpu",
                ),
            )
            self.assertGreaterEqual(bound, int(b.seq_lens.sum()))

    def test_tree_mask_of_a_pipeline_stage(self):
        with self.case(TREE, CTX, 1) as m:
            b, worker = self.inputs(m)
            rows = torch.zeros(REQS, TREE.draft_tokens, dtype=torch.int64)
            b.batch_size, b.reqs = (lambda: REQS), []
            b.spec_info = SimpleNamespace(
                rids=[], tokens=rows, topology=lambda fallback: (rows, rows)
            )
            stage = SimpleNamespace(device="cpu", tp_worker=worker)
            bound = self.bound(
                eagle_utils,
                lambda: SchedulerPPMixin._pp_spec_rebuild_verify_input(stage, b),
            )
            self.assertGreaterEqual(bound, int(b.seq_lens.sum()))

    def test_tree_mask_without_draft_steps(self):
        with self.case(TREE, CTX, 1) as m:
            b, worker = self.inputs(m)
            spec_worker = SimpleNamespace(device="cpu", _target_worker=worker, topk=1)
            verify = EAGLEWorkerV2._build_trivial_verify_input(spec_worker, b)
            cells = int(b.seq_lens.sum()) + REQS
            self.assertGreaterEqual(verify.custom_mask.numel(), cells)


class TestKernelBounds(AttentionTableCase):
    def test_every_backend_takes_the_rows_width(self):
        """Kernels are handed it as the longest sequence they will see."""
        for name in (name for name in ROW_WIDE if name in BACKENDS):
            with self.case(CHAIN, CTX, 64, mla=name.endswith("mla")) as m, Guards():
                backend = build(name, m)
                self.assertEqual(backend.max_context_len, CHAIN.row(CTX, 64), name)

    def test_triton_deterministic_splits(self):
        ctx = 512
        with CHAIN.published(1, enable_deterministic_inference=True):
            backend = build("triton", runner(ctx, CHAIN.row(ctx, 1), 1, draft=True))
            splits = torch.zeros(REQS, dtype=torch.int32)
            longest = CHAIN.committed(ctx) + CHAIN.steps - 1
            backend.get_num_kv_splits(splits, torch.full((REQS,), longest))
            self.assertLessEqual(int(splits.max()), backend.max_kv_splits)

    def test_minimax_captured_bound(self):
        ctx, page = 256, 128
        with self.case(CHAIN, ctx, page) as m:
            m.token_to_kv_pool = MiniMaxSparseKVPool(
                size=REQS * page,
                page_size=page,
                dtype=torch.float32,
                head_num=1,
                head_dim=4,
                idx_head_dim=4,
                dense_layer_ids=[0],
                sparse_layer_ids=[1],
                device="cpu",
                start_layer=0,
                end_layer=2,
            )
            m.model_config.hf_config.sparse_attention_config = MINIMAX
            backend = build("minimax", m)
            backend.is_hip = True
            backend.init_forward_metadata_out_graph(
                batch(m, CHAIN.committed(ctx), VERIFY), in_capture=True
            )
            self.assertGreaterEqual(backend._max_seqlen_k, CHAIN.committed(ctx) + DRAFT)

    def nvfp4_bound(self, ctx, row):
        """Tokens that the captured MSA-v1 plan is built for."""
        from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool

        with self.case(CHAIN, 256, 128) as m:
            m.model_config.context_len = ctx
            m.req_to_token_pool = SimpleNamespace(
                req_to_token=torch.zeros(1, row, dtype=torch.int32)
            )
            m.token_to_kv_pool = MagicMock(spec=MiniMaxM3Nvfp4KVPool, page_size=128)
            m.token_to_kv_pool.head_num = 4
            m.token_to_kv_pool.sparse_layer_id_mapping = {}
            m.token_to_kv_pool.index_k_pool = SimpleNamespace(num_pages=1)
            m.model_config.hf_config.sparse_attention_config = MINIMAX
            m.model_config.hf_text_config = SimpleNamespace(
                num_attention_heads=64, num_key_value_heads=4, head_dim=128
            )
            backend = build("minimax_nvfp4", m)
            with patch.object(backend, "_prepare_msa_v1_decode_plan") as plan:
                backend.init_forward_metadata_out_graph(
                    SimpleNamespace(forward_mode=VERIFY, seq_lens=torch.ones(1))
                )
            return plan.call_args.kwargs["max_seq_len"]

    def test_minimax_nvfp4_plan(self):
        ctx = 256
        self.assertGreaterEqual(
            self.nvfp4_bound(ctx, CHAIN.row(ctx, 128)), CHAIN.committed(ctx) + DRAFT
        )

    def test_minimax_nvfp4_plan_stays_in_what_msa_indexes(self):
        most = 8192 * 128
        self.assertEqual(self.nvfp4_bound(most, most + 128), most)
        # A longer context is still refused by the plan, not cut.
        self.assertEqual(self.nvfp4_bound(most + 1, most + 129), most + 1)


class TestContextLengthStays(AttentionTableCase):
    """What is no width of a table keeps the model's context length."""

    def test_triton_mla_splits(self):
        with (
            self.case(CHAIN, 2048, 64, mla=True) as m,
            patch.object(module("triton"), "get_device_core_count", lambda *args: 132),
        ):
            self.assertEqual(build("triton", m).max_kv_splits, 64)

    def test_trtllm_mha_fp4_prefill_rows(self):
        access = KVCacheAttentionAccess(
            phase="prefill",
            kind=KVCacheAttentionAccessKind.NATIVE_FP4,
            backend_matcher=KVCacheBackendMatcher(any_backend=True),
            scale_recipe="nvfp4",
        )
        with (
            self.case(CHAIN, CTX, 16) as m,
            patch.object(
                module("trtllm_mha"), "_native_fp4_prefill_output_capacity"
            ) as capacity,
            Guards(),
        ):
            capacity.side_effect = Called
            m.prefill_attention_backend_str = "trtllm_mha"
            m.token_to_kv_pool.get_kv_cache_quant_method = lambda: SimpleNamespace(
                resolve_attention_access=lambda phase, backend: access
            )
            with self.assertRaises(Called):
                build("trtllm_mha", m)
            self.assertEqual(capacity.call_args.args[0], CTX)

    def test_minicpm_refuses_a_short_context(self):
        from sglang.srt.configs.minicpm import MiniCPMHybridConfig

        with self.case(CHAIN, CTX, 16) as m:
            dense_len = CHAIN.row(CTX, 16)
            self.assertGreater(dense_len, CTX)
            m.model_config.hf_config = MagicMock(
                spec=MiniCPMHybridConfig,
                has_minicpm_sparse_attention=True,
                sparse_config={
                    "kernel_size": 8,
                    "kernel_stride": 4,
                    "init_blocks": 1,
                    "block_size": 16,
                    "window_size": 16,
                    "dense_len": dense_len,
                    "topk": 1,
                },
            )
            with self.assertRaisesRegex(ValueError, f"{dense_len}, got {CTX}"):
                build("minicpm", m, use_flashinfer=False)


if __name__ == "__main__":
    unittest.main()
