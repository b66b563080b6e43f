"""Tables that are as wide as the row from the start."""

import os
import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

os.environ["TRITON_INTERPRET"] = "1"

from sglang.test.test_utils import maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

import torch

from sglang.srt.model_executor.model_runner_components.ngram_embedding_manager import (
    NgramEmbeddingManager,
)
from sglang.srt.runtime_context import get_schedule
from sglang.test.attention_backends import AttentionTableCase, build, module
from sglang.test.attention_tables import CHAIN, REQS
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_pools import build_with

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

CTX = 48
DRAFT = CHAIN.draft_tokens


class TestIndexerTables(AttentionTableCase):
    def test_deepseek_v4_hip_tables_have_one_width(self):
        """AITER compiles its row-group kernel per width; a captured graph keeps one."""
        ctx = 4096
        with self.case(CHAIN, ctx, 256) as m:
            m.model_config.head_dim = m.model_config.v_head_dim = 512
            m.hisparse_coordinator, m.model = None, MagicMock()
            m.token_to_kv_pool = MagicMock(
                spec=module("dsv4_hip").DeepSeekV4TokenToKVPool,
                swa_page_size=256,
                present_ratios=(1, 2),
            )
            backend = build("dsv4_hip", m)
            widths = {
                self.low_ratio_table(backend, seq_len).shape[1]
                for seq_len in (1, CHAIN.committed(ctx) + DRAFT)
            }
            self.assertEqual(len(widths), 1, widths)

    def low_ratio_table(self, backend, seq_len):
        """A decode step's block table, at ratio 1: a token a slot, 64 slots a block."""
        from sglang.srt.layers.attention.dsv4 import low_ratio_backend_hip

        pages = SimpleNamespace(
            page_table=torch.zeros(1, -(-seq_len // 64), dtype=torch.int32)
        )
        made = low_ratio_backend_hip.build_low_ratio_decode_workspaces(
            {1: pages},
            max_context_len=backend.max_context_len,
            page8_ratios=frozenset({1}),
        )
        return made[1].guarded_page_table


class TestTokenTable(AttentionTableCase):
    def test_ngram_token_table_mirrors_the_rows(self):
        """It is read at a position of the request's row, a verify's included."""
        with self.case(CHAIN, CTX, 1) as m:
            config = m.model_config
            config.use_ngram_embedding, config.use_engram = True, False
            for holder in (config, config.hf_config):
                holder.ngram_embedding_n = holder.ngram_embedding_k = 2
            with get_schedule().override(chunked_prefill_size=64):
                made = build_with(
                    NgramEmbeddingManager.from_model,
                    model=torch.nn.Module(),
                    model_config=m.model_config,
                    req_to_token_pool=m.req_to_token_pool,
                    server_args=SimpleNamespace(chunked_prefill_size=64),
                    max_running_requests=REQS,
                    device="cpu",
                )
            self.assertEqual(made.table.shape, m.req_to_token_pool.req_to_token.shape)


if __name__ == "__main__":
    unittest.main()
