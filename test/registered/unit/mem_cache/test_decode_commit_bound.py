"""How far the scheduler's own loops take a request that it decodes once more.

req_to_token rows are sized from this bound.
"""

import functools
import os
import unittest

# Read when triton is imported: the row write is a Triton kernel.
os.environ.setdefault("TRITON_INTERPRET", "1")

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.decode_loops import LOOPS, DecodeLoop
from sglang.test.row_builders import BUILDERS, Shape, configured

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

CONTEXT_LEN = 40
# The longest prompt that max_req_input_len admits.
MAX_INPUT_LEN = CONTEXT_LEN - 7
# (shape, the fewest and the most tokens that one verify accepts)
EAGLE = (Shape("EAGLE3", 5, 4, 8), 1, 6)
DSPARK = (Shape("DSPARK", 1, 1, 8), 1, 8)
UNO = (Shape("UNO", 1, 1, 4), 2, 5)


@functools.cache
def longest(shape, accepts, loop):
    """The largest of each length over every residue of the prompt, past the context;
    `shape` is published."""
    steps = [
        step
        for accept in accepts
        for input_len in range(MAX_INPUT_LEN - accept, MAX_INPUT_LEN + 1)
        for step in DecodeLoop(CONTEXT_LEN, input_len, accept=accept, loop=loop).run()
    ]
    return [max(lengths) - CONTEXT_LEN for lengths in zip(*steps)]


class TestDecodeCommitBound(CustomTestCase):
    def assert_bounds(self, shape, least, most, expected):
        """`expected`: committed and on-device length of each loop, past the context."""
        with configured(shape, page_size=1):
            rows, _ = BUILDERS["plain"](CONTEXT_LEN, 4096, 4)
            width = rows.req_to_token.shape[1] - CONTEXT_LEN
            for loop, lengths in zip(LOOPS, expected, strict=True):
                with self.subTest(shape.algorithm, loop=loop):
                    *found, allocated = longest(shape, (least, most), loop)
                    self.assertEqual(tuple(found), lengths)
                    self.assertLessEqual(allocated, width)

    def test_eagle_tree(self):
        self.assert_bounds(*EAGLE, [(-4, -4), (-5, 1), (-4, -4), (-4, 2)])

    def test_block_draft(self):
        self.assert_bounds(*DSPARK, [(-4, -4), (-5, 3), (-4, -4), (-4, 4)])

    def test_uno(self):
        self.assert_bounds(*UNO, [(-4, -4), (-5, 0), (-4, -4), (-4, 1)])

    def test_no_loop_passes_the_bound(self):
        """Whenever a loop drops a finishing request: rows are sized from this."""
        for shape, least, most in (EAGLE, DSPARK):
            with self.subTest(shape.algorithm), configured(shape, page_size=1):
                found = [longest(shape, (least, most), loop) for loop in LOOPS]
                committed, on_device, _ = map(max, zip(*found))
                self.assertEqual((committed, on_device), (-4, most - 4))

    def test_no_speculation_stays_below_the_context(self):
        with configured(Shape(), page_size=1):
            for loop in LOOPS:
                with self.subTest(loop=loop):
                    _, _, allocated = longest(Shape(), (1,), loop)
                    self.assertLessEqual(allocated, -2)


if __name__ == "__main__":
    unittest.main()
