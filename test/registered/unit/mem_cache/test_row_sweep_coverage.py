"""What test_req_to_token_rows.py sweeps holds for what it does not name."""

import contextlib
import importlib.util
import itertools
import os
import unittest
from pathlib import Path

# Read when triton is imported: the row write is a Triton kernel.
os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.decode_prepare import PREPARES, allocated_ends
from sglang.test.kv_cache_families import FAMILIES
from sglang.test.row_builders import Shape, configured

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

PAGES = (1, 4, 16, 64, 128)
DCP_SIZES = (1, 2, 4, 8)
SWEPT = sorted({page * dcp for page, dcp in itertools.product(PAGES, DCP_SIZES)})
# EAGLE's workers, multi-layer ones too, run as one of these.
LIKE_EAGLE3 = ("EAGLE", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")


def names():
    """Those published under their own name: NEXTN may be EAGLE's by then."""
    for name in LIKE_EAGLE3:
        with contextlib.suppress(ValueError):
            SpeculativeAlgorithm.from_string(name)
            yield name


def shapes():
    for steps, topk in itertools.product(range(1, 9), (1, 2, 4, 8)):
        for draft_tokens in (steps + 1,) if topk == 1 else (4, 8, 16):
            yield steps, topk, draft_tokens


class TestEagle3SweepIsTheOthers(CustomTestCase):
    def test_every_step_count_ends_where_eagle3_ends(self):
        """The real dispatch and prepare, at every residue of the committed length."""

        def ends(name, steps, topk, draft_tokens):
            leaves = {
                "speculative_algorithm": name,
                "speculative_num_steps": steps,
                "speculative_eagle_topk": topk,
                "speculative_num_draft_tokens": draft_tokens,
                "max_speculative_num_draft_tokens": draft_tokens,
            }
            # Those that this SGLang publishes.
            leaves = {leaf: leaves[leaf] for leaf in leaves if leaf in get_spec()}
            with get_spec().override(**leaves):
                return allocated_ends(committed, page_size=page_size)

        found_names = list(names())
        self.assertIn("STANDALONE", found_names)
        for page_size in SWEPT:
            committed = range(1, page_size + 2)
            with configured(Shape("EAGLE3", 3, 1, 4), page_size=page_size):
                for shape in shapes():
                    expected = ends("EAGLE3", *shape)
                    for name in found_names:
                        found = ends(name, *shape)
                        self.assertEqual(found, expected, (name, shape, page_size))

    def test_no_other_module_allocates_for_a_decode_step(self):
        """A worker with a prepare of its own would have to be swept by name."""
        srt = Path(importlib.util.find_spec("sglang.srt.server_args").origin).parent
        calls = {
            path
            for path in (srt / "speculative").rglob("*.py")
            if "alloc_for_spec_decode(" in path.read_text()
        }
        self.assertEqual(calls, {Path(module.__file__) for module in PREPARES})


class TestSweptPages(CustomTestCase):
    def test_every_allocator_family_pages_as_one_that_is_swept(self):
        """HiSparse and page-interleave among them, which no builder of rows makes."""
        cases = (
            (fam, page_size, dcp_size)
            for fam, dcp_size in itertools.product(FAMILIES, DCP_SIZES)
            for page_size in fam.page_sizes
            # Neither of the two is built under DCP.
            if fam.name not in ("token", "page_interleave") or dcp_size == 1
        )
        for fam, page_size, dcp_size in cases:
            with (
                self.subTest(fam.name, page=page_size, dcp=dcp_size),
                get_parallel().override(attn_dcp_size=dcp_size),
            ):
                allocator, _ = fam.build(8 * page_size, page_size, dcp_size)
                self.assertIn(allocator.page_size, SWEPT)


if __name__ == "__main__":
    unittest.main()
