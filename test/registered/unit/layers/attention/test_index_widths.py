"""Flat index buffers and masks hold the longest sequence that speculation publishes.

Real backends and index builders, at a row that is wider than the context length.
"""

import os
import unittest
from unittest.mock import MagicMock

os.environ["TRITON_INTERPRET"] = "1"

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.test.attention_backends import AttentionTableCase, build
from sglang.test.attention_tables import (
    CHAIN,
    LONG_CHAIN,
    REQS,
    TREE,
    Guards,
    batch,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_pools import build_with

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

CTX = 48
DECODE = ForwardMode.DECODE
VERIFY = ForwardMode.TARGET_VERIFY
EXTEND = ForwardMode.DRAFT_EXTEND_V2


def verify_batch(m, spec):
    b = batch(m, spec.committed(CTX), VERIFY)
    cells = spec.draft_tokens * (spec.committed(CTX) + spec.draft_tokens)
    b.spec_info.custom_mask = torch.ones(REQS * cells, dtype=torch.bool)
    return b


class TestDraftIndexWidths(AttentionTableCase):
    def check(self, name, spec, mla=False):
        """Every branch of every step reads its own request's tokens."""
        committed = spec.committed(CTX)
        for graph in (True, False):
            with self.case(spec, CTX, 1, mla=mla, draft=True) as m:
                with Guards():
                    backend = build(name, m, spec.topk, spec.steps)
                # The steps' own kernels are not under test, their indices are.
                step = MagicMock(use_sliding_window_kv_pool=False, max_kv_splits=1)
                backend.attn_backends = [step] * (spec.steps - 1)
                b = batch(m, committed, DECODE)
                b.seq_lens_cpu, b.seq_lens_sum = b.seq_lens, committed * REQS
                b.spec_info.is_draft_input = lambda: True
                seen = []
                with self.guarded():
                    if graph:
                        backend.init_cuda_graph_state(REQS, REQS * spec.topk)
                        backend.common_template(
                            b,
                            backend.cuda_graph_kv_indices,
                            lambda i, b: seen.append(b.spec_info.kv_indices),
                        )
                    else:
                        step.init_forward_metadata = lambda b: seen.append(
                            b.spec_info.kv_indices
                        )
                        backend.init_forward_metadata(b)
                self.assertEqual(len(seen), spec.steps - 1)
                for i, indices in enumerate(seen):
                    starts = range(0, indices.numel(), committed + i + 1)
                    self.assertEqual(len(starts), REQS * spec.topk)
                    self.assert_prefixes(m, indices, starts, spec.topk, committed)

    def assert_prefixes(self, m, indices, starts, topk, committed):
        for branch, start in enumerate(starts):
            tokens = m.req_to_token_pool.req_to_token[1 + branch // topk, :committed]
            self.assertEqual(
                indices[start : start + committed].tolist(), tokens.tolist()
            )

    def test_triton_draft_indices(self):
        self.check("triton_draft", TREE)

    def test_flashinfer_draft_indices(self):
        self.check("flashinfer_draft", TREE)

    def test_flashinfer_mla_draft_indices(self):
        self.check("flashinfer_mla_draft", LONG_CHAIN, mla=True)

    def test_aiter_draft_indices(self):
        self.check("aiter_draft", TREE)


class TestTargetIndexWidths(AttentionTableCase):
    def assert_tokens(self, m, indices, length):
        """Each request's first `length` tokens, one request after the other."""
        tokens = m.req_to_token_pool.req_to_token[1 : REQS + 1, :length].flatten()
        self.assertEqual(indices[: REQS * length].tolist(), tokens.tolist())

    def test_triton_eager_indices(self):
        committed = TREE.committed(CTX)
        with self.case(TREE, CTX, 1) as m:
            backend = build("triton", m)
            extend = batch(m, committed + TREE.draft_tokens, EXTEND)
            extend.spec_info.extend_seq_lens_tensor = extend.extend_seq_lens
            for b in (verify_batch(m, TREE), extend):
                with self.guarded():
                    backend.init_forward_metadata(b)
                indices = backend.forward_metadata.kv_indices
                self.assert_tokens(m, indices, committed)

    def test_flashinfer_mla_verify_indices(self):
        with self.case(CHAIN, CTX, 1, mla=True) as m:
            with Guards():
                backend = build("flashinfer_mla", m)
                backend.init_cuda_graph_state(REQS, REQS * CHAIN.draft_tokens)
            b = verify_batch(m, CHAIN)
            verify = EagleVerifyInput.__new__(EagleVerifyInput)
            verify.draft_token_num = CHAIN.draft_tokens
            verify.custom_mask = b.spec_info.custom_mask
            packed = build_with(
                verify.generate_attn_arg_prefill,
                req_to_token=m.req_to_token_pool.req_to_token,
                req_pool_indices=b.req_pool_indices,
                paged_kernel_lens=b.seq_lens,
                paged_kernel_lens_sum=int(b.seq_lens.sum()),
                translator=m.kv_index_translator,
                plan=b.kv_loc_plan,
            )[0]
            # What FlashInfer's graph wrapper does with the packed indices.
            backend.cuda_graph_kv_indices[: len(packed)].copy_(packed)
            length = CHAIN.committed(CTX) + CHAIN.draft_tokens
            self.assert_tokens(m, backend.cuda_graph_kv_indices, length)

    def check_graph_verify(self, name, m, spec, length):
        backend = build(name, m)
        with self.guarded():
            backend.init_cuda_graph_state(REQS, REQS * spec.draft_tokens)
            backend.init_forward_metadata_out_graph(
                verify_batch(m, spec), in_capture=True
            )
        self.assert_tokens(m, backend.cuda_graph_kv_indices, length)
        return backend

    def test_aiter_mla_verify_indices(self):
        with self.case(LONG_CHAIN, CTX, 16, mla=True) as m:
            length = LONG_CHAIN.committed(CTX) + LONG_CHAIN.draft_tokens
            self.check_graph_verify("aiter", m, LONG_CHAIN, length)

    def test_aiter_mask(self):
        for page in (1, 16):
            self.check_mask("aiter", CHAIN, page)

    def test_wave_mask(self):
        for spec in (CHAIN, TREE):
            self.check_mask("wave", spec, page=1)

    def check_mask(self, name, spec, page):
        cells = REQS * spec.draft_tokens * (spec.committed(CTX) + spec.draft_tokens)
        with self.case(spec, CTX, page) as m:
            backend = self.check_graph_verify(name, m, spec, spec.committed(CTX))
            self.assertEqual(int(backend.mask_indptr[REQS]), cells)
            self.assertEqual(int(backend.cuda_graph_custom_mask.sum()), cells)

    def test_verify_mask(self):
        cells = TREE.draft_tokens * (TREE.committed(CTX) + TREE.draft_tokens)
        for name in ("triton", "fa"):
            with self.case(TREE, CTX, 1) as m:
                backend = build(name, m)
                backend.init_cuda_graph_state(REQS, REQS * TREE.draft_tokens)
                self.assertEqual(backend.verify_mask.mode, TreeMaskMode.FULL_MASK)
                self.assertGreaterEqual(
                    backend.verify_mask.buffer.numel(), REQS * cells
                )


if __name__ == "__main__":
    unittest.main()
