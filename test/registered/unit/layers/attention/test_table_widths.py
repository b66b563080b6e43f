"""Page tables hold the longest sequence that speculation publishes.

Real backends and table builders, at a row that is wider than the context length.
"""

import os
import unittest
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.attention_backends import AttentionTableCase, build
from sglang.test.attention_tables import (
    CHAIN,
    COMPRESS_RATIO,
    LONG_CHAIN,
    REQS,
    TREE,
    Guards,
    batch,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

DECODE = ForwardMode.DECODE
VERIFY = ForwardMode.TARGET_VERIFY
EXTEND = ForwardMode.DRAFT_EXTEND_V2
DRAFT = CHAIN.draft_tokens
LAST_STEP = CHAIN.steps - 1
# Context lengths that end a page, end one short of it, or lie inside one.
PAGES = [(1, 48), (16, 48), (16, 47), (16, 56), (64, 128), (64, 127), (64, 130)]
# The MLA table builder works in blocks of 4096 tokens.
BLOCKS = [(32, 4096), (32, 4095), (64, 4096), (64, 4097)]


def paged(backend):
    return (
        backend.forward_metadata.page_table,
        backend.forward_metadata.cache_seqlens_int32,
    )


def blocked(backend):
    md = backend.forward_decode_metadata
    return md.block_kv_indices, md.seq_lens_k


class TestTableWidths(AttentionTableCase):
    def capture(self, backend, b):
        with Guards() as guards:
            backend.init_cuda_graph_state(REQS, b.positions.numel())
            backend.init_forward_metadata_out_graph(b, in_capture=True)
            backend.init_forward_metadata_in_graph(b)
        return guards

    def eager(self, backend, b):
        with Guards() as guards:
            backend.init_forward_metadata(b)
        return guards

    def check(self, name, cases, fill, read, mla=False, spec=CHAIN):
        """Verify and draft extend both publish committed + draft tokens."""
        for page, ctx in cases:
            with self.case(spec, ctx, page, mla=mla) as m:
                committed = spec.committed(ctx)
                longest = committed + spec.draft_tokens
                for mode, length in ((VERIFY, committed), (EXTEND, longest)):
                    with Guards():
                        backend = build(name, m)
                    guards = fill(backend, batch(m, length, mode))
                    table, published = read(backend)
                    if published is not None:
                        self.assertEqual(published.tolist(), [longest] * REQS)
                    self.assert_holds(m, table, longest, guards)

    def test_fa_graph(self):
        self.check("fa", PAGES, self.capture, paged)

    def test_fa_eager(self):
        self.check("fa", PAGES, self.eager, paged)

    def test_fa_draft_steps(self):
        for page, ctx in PAGES:
            with self.case(CHAIN, ctx, page, draft=True) as m:
                committed = CHAIN.committed(ctx)
                for fill in (self.capture, self.eager):
                    steps = build("fa_draft", m, 1, CHAIN.steps).attn_backends
                    self.assertEqual(len(steps), LAST_STEP)
                    guards = fill(steps[-1], batch(m, committed, DECODE))
                    table, published = paged(steps[-1])
                    self.assertEqual(published.tolist(), [committed + LAST_STEP] * REQS)
                    self.assert_holds(m, table, committed + LAST_STEP, guards)

    def test_fa_tree(self):
        ctx, steps = 48, TREE.steps
        committed = TREE.committed(ctx)
        cells = TREE.draft_tokens * (committed + TREE.draft_tokens)
        with self.case(TREE, ctx, 1) as m:
            b = batch(m, committed, VERIFY)
            b.spec_info.custom_mask = torch.ones(REQS * cells, dtype=torch.bool)
            self.check_prefix(m, build("fa", m), b)
        with self.case(TREE, ctx, 1, draft=True) as m:
            b = batch(m, committed, DECODE)
            b.out_cache_loc = torch.arange(REQS * TREE.topk * steps)
            backend = build("fa_draft", m, TREE.topk, steps).attn_backends[-1]
            self.check_prefix(m, backend, b)

    def check_prefix(self, m, backend, b):
        """A tree keeps its own tokens in a second table; the first is the prefix."""
        guards = self.capture(backend, b)
        with guards:
            backend.init_forward_metadata_out_graph(b)
        table, prefix = paged(backend)
        self.assertEqual(prefix.tolist(), b.seq_lens.tolist())
        self.assert_holds(m, table, int(b.seq_lens[0]), guards)

    def test_trtllm_mha_graph(self):
        self.check("trtllm_mha", PAGES[1:], self.capture, paged)

    def test_trtllm_mha_eager(self):
        self.check("trtllm_mha", PAGES[1:] + [(64, 4096)], self.eager, paged)

    def test_trtllm_mla_graph(self):
        self.check("trtllm_mla", BLOCKS, self.capture, blocked, mla=True)

    def test_trtllm_mla_eager(self):
        self.check("trtllm_mla", BLOCKS, self.eager, blocked, mla=True)

    def test_cutedsl_mla_graph(self):
        self.check("cutedsl_mla", BLOCKS, self.capture, blocked, mla=True)

    def test_tokenspeed_mla_graph(self):
        self.check("tokenspeed_mla", BLOCKS, self.capture, blocked, mla=True)

    def test_flashmla_graph(self):
        def table(backend):
            return backend.cuda_graph_kv_indices, None

        cases = [(64, 128), (64, 127), (64, 190), (64, 4095)]
        self.check("flashmla", cases, self.capture, table, mla=True)

    def test_flashmla_eager(self):
        def table(backend):
            return backend.forward_metadata.block_kv_indices, None

        # Six tokens a round reach two past the context length plus the draft.
        cases = [(64, 121), (64, 128)]
        self.check("flashmla", cases, self.eager, table, mla=True, spec=LONG_CHAIN)

    def test_flashmla_graph_table_is_as_wide_as_the_row(self):
        for page, ctx in [(64, 128), (64, 190)]:
            with self.case(CHAIN, ctx, page, mla=True) as m, Guards():
                backend = build("flashmla", m)
                backend.init_cuda_graph_state(REQS, REQS * DRAFT)
                self.assertEqual(
                    backend.cuda_graph_kv_indices.shape[1], CHAIN.row(ctx, page) // page
                )

    def test_xpu_graph(self):
        self.check("xpu", PAGES, self.capture, paged)

    def test_aiter_unified(self):
        for page, ctx in PAGES:
            with (
                self.case(CHAIN, ctx, page) as m,
                patch.dict(os.environ, SGLANG_USE_AITER_UNIFIED_ATTN="1"),
            ):
                committed = CHAIN.committed(ctx)
                for fill in (self.capture, self.eager):
                    backend = build("aiter", m)
                    b = batch(m, committed, VERIFY)
                    b.seq_lens_cpu = b.seq_lens
                    guards = fill(backend, b)
                    table = backend.forward_metadata.kv_indices
                    self.assert_holds(m, table, committed + DRAFT, guards)

                lens = committed + LAST_STEP
                tokens = m.req_to_token_pool.req_to_token[1:, :lens]
                b = batch(m, committed, DECODE)
                b.seq_lens_cpu = b.seq_lens
                b.spec_info.kv_indptr = torch.arange(REQS + 1, dtype=torch.int32) * lens
                b.spec_info.kv_indices = tokens.flatten()
                backend = build("aiter", m)
                guards = self.eager(backend, b)
                table = backend.forward_metadata.kv_indices
                self.assert_holds(m, table, lens, guards)

    def check_ascend(self, host_bound):
        """`host_bound(lens, row)`: what a replay reads its longest length from."""
        page = 128
        for ctx in (256, 255, 250, 380):
            committed = CHAIN.committed(ctx)
            # Rows hold whole allocated pages, and their end is what is published.
            allocated = -(-(committed + 2 * DRAFT) // page) * page
            with self.case(CHAIN, ctx, page, row=allocated) as m:
                with Guards():
                    backend = build("ascend", m)
                b = batch(m, committed, VERIFY)
                guards = self.capture(backend, b)
                table = backend.graph_metadata["block_tables"]
                self.assert_holds(m, table, committed + DRAFT, guards)
                table.zero_()
                b.__dict__.update(host_bound(b.seq_lens, allocated))
                backend.init_forward_metadata_out_graph(b)
                self.assert_holds(m, table, committed + DRAFT, guards)

    def test_ascend_graph(self):
        self.check_ascend(lambda lens, row: {"seq_lens_cpu": lens})

    def test_ascend_graph_without_host_lengths(self):
        self.check_ascend(lambda lens, row: {"max_seq_len_host": row})

    def test_qsa_graph(self):
        for page, ctx in [(16, 48), (16, 47), (16, 60), (64, 128)]:
            with self.case(CHAIN, ctx, page) as m:
                m.token_to_kv_pool.qsa_compress_ratio = COMPRESS_RATIO
                m.token_to_kv_pool.qsa_compressed_page_size = page // COMPRESS_RATIO
                m.token_to_kv_pool.qsa_block_topk = 1
                committed = CHAIN.committed(ctx)
                b = batch(m, committed, VERIFY)
                b.spec_info.draft_token_num = DRAFT
                b.spec_info.topk = 1
                backend = build("qsa", m)
                guards = self.capture(backend, b)
                backend.init_forward_metadata_out_graph(b)
                # One row for each draft token; the last one reads furthest.
                indexer = backend.forward_metadata.indexer_metadata
                last = slice(DRAFT - 1, None, DRAFT)
                lens = indexer.sequence_lengths[last]
                self.assertEqual(lens.tolist(), [committed + DRAFT] * REQS)
                table = indexer.graph_compressed_page_table[last]
                compressed = (committed + DRAFT) // COMPRESS_RATIO * COMPRESS_RATIO
                self.assert_holds(m, table, compressed, guards)


if __name__ == "__main__":
    unittest.main()
