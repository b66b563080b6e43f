"""No prepare-for-decode allocates past a req_to_token row, whoever built the row."""

import itertools
import os
import unittest
from unittest.mock import patch

# Read when triton is imported: the row write is a Triton kernel.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.decode_prepare import (
    allocated_ends,
    attach_spec_info,
    guard_rows,
    new_req,
    prefilled_batch,
    prepare_and_release,
    rebuild_compact_rows,
    tree_cache,
)
from sglang.test.row_builders import BUILDERS, Shape, configured, known, reshaped

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

PAGES = (1, 4, 16, 64, 128)
DCP_SIZES = (1, 2, 4, 8)
# One divides by the pages, one by none.
CONTEXT_LENS = (512, 301)
TOPKS = (1, 2, 4, 8)
SEPARATE = ("plain", "decode", "hybrid mamba", "hybrid mamba decode", "swa")
UNIFIED = tuple(name for name in BUILDERS if name.startswith("unified"))
# What --enable-unified-memory admits, as chains.
FUSED = ("EAGLE", "EAGLE3", "DFLASH", "DSPARK")


def max_committed_len(context_len):
    # test_decode_commit_bound.py takes it from the scheduler's loops.
    return context_len - 4


COMMITTED = range(1, max_committed_len(max(CONTEXT_LENS)) + 1)


def pages_of(case):
    (_, page_size, dcp_size, _), _ = case
    return page_size, dcp_size


def eagle(algorithm, all_steps, tree_draft_tokens):
    """Chains draft steps + 1 tokens; a tree is cut to any number of them."""
    for steps, topk in itertools.product(all_steps, TOPKS):
        for draft_tokens in (steps + 1,) if topk == 1 else tree_draft_tokens:
            yield Shape(algorithm, steps, topk, draft_tokens)


def blocks(algorithm, sizes):
    return [Shape(algorithm, 1, 1, n) for n in sizes]


def ngram():
    for breadth, draft_tokens in itertools.product((*TOPKS, 10), (4, 8, 12, 16)):
        steps = max(1, draft_tokens // breadth)
        yield Shape("NGRAM", steps, breadth, draft_tokens)


class TestRowsHoldEveryAllocation(CustomTestCase):
    """Every committed length; the real prepare of the algorithm, the real builders."""

    def sweep(self, shapes):
        shapes = list(shapes)
        self.num_cases, self.overruns, self.wasted = 0, [], []
        for page_size, dcp_size in itertools.product(PAGES, DCP_SIZES):
            with configured(shapes[0], page_size=page_size, dcp_size=dcp_size):
                for shape in shapes:
                    with reshaped(shape):
                        self.check(shape, page_size, dcp_size)
        found = {"overrun": self.overruns, "waste": self.wasted}
        self.report(shapes[0].algorithm, self.num_cases, **found)

    def check(self, shape, page_size, dcp_size):
        fused = shape.topk == 1 and shape.algorithm in FUSED
        builders = SEPARATE + UNIFIED if fused else SEPARATE
        # Of every committed length; a shorter context has the first of them.
        ends = {}
        for context_len, builder in itertools.product(CONTEXT_LENS, builders):
            rows, allocator = BUILDERS[builder](context_len, 1024, 4)
            page = allocator.page_size
            if page not in ends:
                ends[page] = allocated_ends(COMMITTED, page_size=page)
            num_committed = max_committed_len(context_len)
            end = max(ends[page][:num_committed])
            width = rows.req_to_token.shape[1]
            # The guard of the row write reads this one.
            self.assertEqual(rows.max_context_len, width)
            case = (*shape, page_size, dcp_size, builder, context_len)
            self.num_cases += num_committed
            if end > width:
                self.overruns.append((end - width, case))
            if width > max(end, context_len + 4) + page - 1:
                self.wasted.append((width - end, case))

    def report(self, name, num_cases, **found):
        counts = ", ".join(f"{what} {len(cases)}" for what, cases in found.items())
        print(f"\n{name}: {num_cases} cases; configurations with {counts}", end=" ")
        for what, cases in found.items():
            if cases:
                lines = "\n".join(f"  {by} columns: {case}" for by, case in cases)
                self.fail(f"{name}: {len(cases)} configurations {what}\n{lines}")

    def test_eagle(self):
        self.sweep(eagle("EAGLE", (3,), (8,)))

    def test_eagle3(self):
        self.sweep(eagle("EAGLE3", (1, 3, 5, 8), (4, 8, 16)))

    def test_standalone(self):
        self.sweep(eagle("STANDALONE", (3,), (8,)))

    def test_frozen_kv_mtp(self):
        self.sweep(eagle("FROZEN_KV_MTP", (3,), (8,)))

    def test_ngram(self):
        self.sweep(ngram())

    def test_dflash(self):
        self.sweep(blocks("DFLASH", (4, 8, 16, 32)))

    def test_dspark(self):
        self.sweep(blocks("DSPARK", (2, 8, 9, 16)))

    def test_uno(self):
        self.sweep(blocks("UNO", (2, 4, 8, 16)))


class TestRealWrites(CustomTestCase):
    """The row write itself, three requests at the limit, on real allocators."""

    def writes(self, shapes, builders):
        num_cases, spilled, lost = 0, [], []
        cases = zip(
            itertools.product(shapes, PAGES, (1, 8), builders),
            itertools.cycle(CONTEXT_LENS),
        )
        cases = sorted(cases, key=pages_of)
        for (page_size, dcp_size), served in itertools.groupby(cases, pages_of):
            with configured(shapes[0], page_size=page_size, dcp_size=dcp_size):
                for (shape, *_, builder), context_len in served:
                    at = max_committed_len(context_len)
                    with reshaped(shape):
                        built = BUILDERS[builder](context_len, 16384, 4)
                        done = prepare_and_release(*built, (at, at - 1, at - page_size))
                    case = (*shape, page_size, dcp_size, builder, context_len)
                    num_cases += 3
                    if done.spilled:
                        spilled.append((done.spilled, case))
                    if done.lost:
                        lost.append((done.lost, case))
        print(f"\n{num_cases} real writes, {len(spilled)} batches spilled", end=" ")
        self.assertEqual(spilled, [], "entries of other rows that were overwritten")
        self.assertEqual(lost, [], "slots that were allocated and not freed")

    def test_every_algorithm(self):
        shapes = known(
            Shape("EAGLE3", 5, 4, 8),
            Shape("STANDALONE", 3, 1, 4),
            Shape("FROZEN_KV_MTP", 3, 1, 4),
            Shape("NGRAM", 1, 10, 12),
            Shape("DFLASH", 1, 1, 16),
            Shape("DSPARK", 1, 1, 8),
            Shape("UNO", 1, 1, 8),
            Shape(),
        )
        self.writes(shapes, ("plain",))

    def test_compact_draft_table(self):
        """DFLASH's own table, rebuilt at the longest length a device can reach."""
        draft_tokens, row = 16, 2
        for context_len, page_size, window, triton in itertools.product(
            CONTEXT_LENS, (1, 4), (64, 4096), (True, False)
        ):
            shape = Shape("DFLASH", 1, 1, draft_tokens)
            with (
                self.subTest(page=page_size, window=window, triton=triton),
                configured(shape, page_size=page_size),
            ):
                rows, _ = BUILDERS["plain"](context_len, 4096, 4)
                whole = guard_rows(rows)
                before = whole.clone()
                seq_lens = torch.tensor([max_committed_len(context_len) + draft_tokens])
                rebuild_compact_rows(
                    rows,
                    row=row,
                    seq_lens=seq_lens,
                    draft_tokens=draft_tokens,
                    window=window,
                    triton=triton,
                )
                before[row] = whole[row]
                self.assertEqual(int((whole != before).sum()), 0)

    def test_every_builder(self):
        self.writes((Shape("DSPARK", 1, 1, 9),), tuple(BUILDERS))


class TestRowGuard(CustomTestCase):
    """A row that is too narrow is refused before anything is taken or written."""

    def assert_refused(self, shape, page_size):
        from sglang.srt.mem_cache.page_geometry import PageGeometryError

        with configured(shape, page_size=page_size):
            rows, allocator = BUILDERS["plain"](301, 4096, 4)
            rows = type(rows)(
                rows.size, max_context_len=301, device="cpu", enable_memory_saver=False
            )
            whole = guard_rows(rows)
            cache = tree_cache(rows, allocator)
            reqs = [new_req("short", 100), new_req("long", 297)]
            batch = prefilled_batch(reqs, rows, allocator, cache)
            attach_spec_info(batch)
            before, free = whole.clone(), allocator.available_size()
            with self.assertRaises(PageGeometryError) as raised:
                batch.prepare_for_decode()
            self.assertEqual(allocator.available_size(), free)
            self.assertTrue(whole.equal(before))
            self.assertEqual([r.kv.kv_allocated_len for r in reqs], [100, 297])
            return str(raised.exception)

    def test_names_request_position_row_page_and_reserve(self):
        self.assertEqual(
            self.assert_refused(Shape("EAGLE3", 5, 4, 8), page_size=1),
            "REQ_TO_TOKEN_ROW_OVERRUN rid=long end=337 row=301 page=1 reserve=40",
        )

    def test_every_prepare_passes_it(self):
        for shape, page_size in (
            (Shape("EAGLE", 3, 1, 4), 4),
            (Shape("NGRAM", 1, 10, 12), 1),
            (Shape("DFLASH", 1, 1, 16), 1),
            (Shape("DSPARK", 1, 1, 8), 4),
            (Shape("UNO", 1, 1, 8), 1),
        ):
            if not known(shape):
                continue
            with self.subTest(shape):
                self.assertIn("rid=long", self.assert_refused(shape, page_size))


class TestSizing(CustomTestCase):
    def test_unset_draft_tokens_are_refused_while_rows_are_built(self):
        from sglang.srt.speculative.spec_registry import CustomSpecAlgo

        plugin = CustomSpecAlgo("PLUGIN", lambda args: None)
        for page_size in (1, 4):
            with (
                patch(
                    "sglang.srt.speculative.spec_info._get_registered_spec",
                    return_value=plugin,
                ),
                configured(Shape("PLUGIN"), page_size=page_size),
                self.assertRaisesRegex(
                    ValueError, "PLUGIN .* --speculative-num-draft-tokens"
                ),
            ):
                BUILDERS["plain"](301, 4096, 4)

    def test_adaptive_rows_and_states_hold_the_longest_draft(self):
        from sglang.srt.runtime_context import get_spec

        with_states = ("hybrid mamba", "unified mamba", "unified mamba swa")
        for builder in (name for name in with_states if name in BUILDERS):
            with (
                self.subTest(builder),
                configured(Shape("EAGLE", 3, 1, 4), page_size=4),
                get_spec().override(max_speculative_num_draft_tokens=16),
            ):
                rows, _ = BUILDERS[builder](1024, 4096, 4)
                states = rows.mamba_pool.mamba_cache.intermediate_ssm
                self.assertEqual(states.shape[2], 16)
                self.assertEqual(rows.req_to_token.shape[1], 1024 - 4 + 2 * 16)

    def test_swa_request_cap_has_one_reserve(self):
        from sglang.srt.model_executor.pool_configurator import compute_swa_request_cap
        from sglang.srt.runtime_context import get_schedule

        def cap(overlap):
            with get_schedule().override(
                disable_overlap_schedule=not overlap, chunked_prefill_size=512
            ):
                return compute_swa_request_cap(
                    page_size=4, window=128, attn_dp_size=1, max_running_requests=8
                )

        for shape in (Shape("EAGLE3", 5, 4, 8), Shape("DSPARK", 1, 1, 8)):
            with configured(shape, page_size=4):
                # Overlap keeps a second prefill chunk in flight, and nothing else.
                self.assertEqual(cap(overlap=True) - cap(overlap=False), 512)


if __name__ == "__main__":
    unittest.main()
