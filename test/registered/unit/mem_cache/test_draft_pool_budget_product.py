"""Bytes charged against bytes built for the product of what SGLang can be started
with: targets of every budget, drafts, DCP sizes and KV dtypes that its argument
validation, told of a Blackwell GPU, permits."""

import itertools
import unittest
from collections import Counter

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.model_executor import pool_configurator
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test import budget_servers as servers
from sglang.test.budget_validation import Refused, blackwell, refusing, resolved
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.pool_budgets import build, page_bytes

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

DCP_SIZES = (1, 2, 4, 8)
# Each pair of target and draft meets four of them in a row, one at each DCP size.
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16")

_blocks = servers.with_blocks
_QUANTIZED = {"kv_lora_rank": 128}
_DSA = servers.DSA._replace(config={**servers.DSA.config, **_QUANTIZED})
_DSA_HISPARSE = servers.DSA_HISPARSE._replace(config=_DSA.config)
_NEXTN_DSA = servers.NEXTN_DSA._replace(
    config={**servers.NEXTN_DSA.config, **_QUANTIZED}
)
_UNIFIED = servers.UNIFIED._replace(
    fields={**servers.UNIFIED.fields, "attention_backend": "trtllm_mla"}
)
TARGETS = (
    _blocks(servers.MHA),
    servers.MLA,
    _DSA,
    _DSA_HISPARSE,
    servers.HYBRID_LINEAR,
    _UNIFIED,
    _blocks(servers.HYBRID_SWA),
    _blocks(servers.REQUEST_CAP),
    servers.UNIFIED_SWA,
    servers.MLA_WINDOWS,
    servers.INKLING,
    _blocks(servers.MINIMAX),
    _blocks(servers.MINIMAX_HISPARSE),
)
DRAFTS = (
    None,
    _blocks(servers.EAGLE),
    _blocks(servers.EAGLE3),
    _blocks(servers.STANDALONE),
    servers.NEXTN_MLA,
    servers.MULTI_LAYER,
    _blocks(servers.DFLASH),
    _blocks(servers.DSPARK),
)

# The heads that come with a target's own checkpoint, and rows so narrow that the
# whole 4 KiB of a unified buffer are few of them.
INSTEAD = {
    (_DSA.name, servers.NEXTN_MLA.name): _NEXTN_DSA,
    (_DSA_HISPARSE.name, servers.NEXTN_MLA.name): _NEXTN_DSA,
    (servers.MLA_WINDOWS.name, servers.NEXTN_MLA.name): servers.NEXTN_WINDOWS,
    (servers.INKLING.name, servers.MULTI_LAYER.name): servers.INKLING_MTP,
    (_UNIFIED.name, servers.DSPARK.name): servers.DSPARK,
}

# Servers refused, by the function of SGLang that refuses them: while arguments are
# validated, and while a unified buffer is laid out for a draft that it cannot hold.
REFUSED = {
    "handle_kv4_compatibility": 45,
    "_mla_kv_cache_dtype_checks": 31,
    "handle_nvfp4_prefill_kv_dequant_dtype": 26,
    "_dsa_dcp_overrides": 24,
    "_dsa_kv_cache_dtype_default": 24,
    "_validate_unified_memory_dcp": 12,
    "handle_unified_memory_pool": 9,
    "_assert_spec_verify_backends": 5,
    "_fused_draft_for_swa_factory": 2,
}
# An MLA layer of a hybrid linear target is charged as FP4, and built of whole bytes:
# without DCP and draft too, which this leaves as it is.
FP4_AS_BYTES = {(servers.HYBRID_LINEAR.name, "fp4_mx_block16")}
# Its budget takes no draft's rows: it adds a layer's share.
NOT_DRIVEN = {"DSV4PoolConfigurator"}
# No pool of its own.
NO_DRAFT_POOL = {"NGRAM", "UNO", "FROZEN_KV_MTP", "NONE"}


class TestBudgetProduct(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.refused, cls.budgets, cls.wrong = Counter(), Counter(), []
        with blackwell():
            for at, (target, draft) in enumerate(itertools.product(TARGETS, DRAFTS)):
                draft = draft and INSTEAD.get((target.name, draft.name), draft)
                for dcp, dcp_size in enumerate(DCP_SIZES):
                    dtype = KV_DTYPES[(at + dcp) % len(KV_DTYPES)]
                    cls.drive(target, draft, dcp_size, dtype)

    @classmethod
    def drive(cls, target, draft, dcp_size, dtype):
        fields = {**target.fields, "kv_cache_dtype": dtype}
        try:
            target = resolved(target._replace(fields=fields), draft, dcp_size=dcp_size)
        except Refused as error:
            cls.refused[str(error)] += 1
            return
        try:
            built = build(target, draft, dcp_size=dcp_size)
        except ValueError as error:
            if not refusing(error).startswith("_fused_draft_for_"):
                raise
            cls.refused[refusing(error)] += 1
            return
        cls.budgets[built.budget] += 1
        pages = sum(map(page_bytes, built.pools))
        if built.target.unified_memory_pool is not None:
            # Whole 4 KiB, a page that is never handed out, two roundings.
            pages = 3 * pages + 4096
        if abs(built.charged - built.allocated) > pages:
            name = draft and draft.name
            ratio = round(built.allocated / built.charged, 2)
            cls.wrong.append((target.name, name, dcp_size, dtype, ratio))

    def test_charged_is_allocated_in_the_product(self):
        known = [w for w in self.wrong if (w[0], w[3]) in FP4_AS_BYTES]
        self.assertEqual([w for w in self.wrong if w not in known], [])
        self.assertTrue(known)

    def test_only_what_sglang_refuses_is_left_out(self):
        self.assertEqual(dict(self.refused), REFUSED)
        driven = sum(self.budgets.values()) + sum(self.refused.values())
        self.assertEqual(driven, len(TARGETS) * len(DRAFTS) * len(DCP_SIZES))

    def test_every_pool_configurator_is_driven(self):
        classes = vars(pool_configurator).items()
        base = pool_configurator.MemoryPoolConfigurator
        every = {
            name
            for name, found in classes
            if isinstance(found, type) and issubclass(found, base) and found is not base
        }
        self.assertEqual(every, {*self.budgets} | NOT_DRIVEN)

    def test_every_draft_algorithm_is_driven(self):
        driven = {draft.algorithm for draft in DRAFTS if draft is not None}
        every = {algorithm.name for algorithm in SpeculativeAlgorithm}
        self.assertEqual(every, driven | NO_DRAFT_POOL)


if __name__ == "__main__":
    unittest.main()
