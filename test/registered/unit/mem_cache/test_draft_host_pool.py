"""A draft's host pool holds every slot that the target's hands out.

Oracle: what leaves the device for a slot comes back from it, for every loc of the
allocator and every slot of the host pool.
"""

import contextlib
import inspect
import itertools
import unittest
from unittest.mock import patch

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.mem_cache import kv_cache_builder
from sglang.srt.mem_cache.hicache_storage import PoolName, SidecarPoolSpec
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.page_geometry import PageGeometryError
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.host_pools import (
    HAS_LEGACY_PATH,
    HAS_SIDECARS,
    cpu_host_pools,
    register_draft,
    register_legacy_draft,
    unified_tree,
)
from sglang.test.host_round_trips import (
    RoundTrip,
    drain,
    mha_pool,
    mla_pool,
    spanned,
    target,
)

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

HAS_EXACT_CAPACITY = HAS_SIDECARS and (
    "host_token_capacity"
    in inspect.signature(assembler._build_mha_mla_host_pool).parameters
)
DRAFTS = {"mha": mha_pool, "mla": mla_pool}
CASES = list(itertools.product(DRAFTS, (4, 16), (1, 2, 4, 8)))


@contextlib.contextmanager
def physical_rows():
    """Draft host pools as if sized from the rows of their anchor, by a ratio."""
    module = assembler if HAS_SIDECARS else kv_cache_builder
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patch.object(
                module,
                "sidecar_ratio",
                lambda anchor, pool: anchor.size / pool.size,
                create=True,
            )
        )
        if HAS_EXACT_CAPACITY:
            build = assembler._build_mha_mla_host_pool
            stack.enter_context(
                patch.object(
                    assembler,
                    "_build_mha_mla_host_pool",
                    lambda **kwargs: build(**{**kwargs, "host_token_capacity": None}),
                )
            )
        yield


class TestDraftHostPool(RoundTrip):
    @contextlib.contextmanager
    def case(self, name, page_size, dcp_size):
        with (
            self.subTest(name, page=page_size, dcp=dcp_size),
            cpu_host_pools(dcp_size=dcp_size),
        ):
            allocator, pool, host = target(page_size, dcp_size)
            yield allocator, pool, host, DRAFTS[name](*spanned(allocator))

    def test_every_slot_comes_back(self):
        for case in CASES:
            with self.case(*case) as (allocator, pool, host, draft):
                pools = register_draft(
                    draft, {PoolName.KV: (pool, host)}, page_size=allocator.page_size
                )
                self.check(host, pools[PoolName.DRAFT], draft, drain(allocator))

    @unittest.skipUnless(HAS_LEGACY_PATH, "no draft on the controller here")
    def test_every_slot_comes_back_on_the_controller(self):
        for case in CASES:
            with self.case(*case) as (allocator, pool, host, draft):
                # The scheduler hands this path its own page, which is not widened.
                pools = register_legacy_draft(draft, host, page_size=pool.page_size)
                self.check(host, pools[PoolName.DRAFT], draft, drain(allocator))

    def test_a_draft_pool_of_physical_rows_does_not_boot(self):
        for case in CASES:
            if case[2] > 1:
                with self.case(*case) as (allocator, pool, host, draft):
                    self.check_refused(allocator, pool, host, draft)

    def check_refused(self, allocator, pool, host, draft):
        with (
            physical_rows(),
            self.assertRaisesRegex(
                PageGeometryError,
                "^DRAFT_HOST_POOL_MISMATCH pool=draft anchor=kv "
                f"reaches={host.logical_size} valid_to=[0-9]+$",
            ) as caught,
        ):
            register_draft(
                draft, {PoolName.KV: (pool, host)}, page_size=allocator.page_size
            )
        valid_to = int(str(caught.exception).rpartition("=")[2])
        self.assertIn(valid_to, range(host.size, host.logical_size))


class TestRegistration(CustomTestCase):
    def test_a_short_sidecar_of_the_target_does_not_boot(self):
        with cpu_host_pools():
            _, pool, host = target(16, 8)
            tree = unified_tree(
                {PoolName.KV: (pool, host), PoolName.INDEXER: (pool, target(16, 1)[2])},
                page_size=128,
            )
            spec = SidecarPoolSpec(
                pool_name=PoolName.INDEXER, indices_from_pool=PoolName.KV
            )
            with self.assertRaisesRegex(
                PageGeometryError,
                "^TARGET_HOST_POOL_MISMATCH pool=indexer anchor=kv "
                "reaches=1664 valid_to=208$",
            ):
                tree.register_sidecar_pool(spec)
            self.assertEqual(tree.sidecar_pool_specs, [])


if __name__ == "__main__":
    unittest.main()
