"""Window, indexer and auto-sized sidecars hold every slot of the pool they follow."""

import functools
import itertools
import unittest

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

import torch

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.test import test_utils
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.host_pools import (
    cpu_host_pools,
    dsa,
    mla_host_pool,
    register_draft,
    unified_tree,
)
from sglang.test.host_round_trips import (
    PAGES,
    RoundTrip,
    drain,
    dsa_pool,
    mha_pool,
    mla_pool,
    qsa_pool,
    spanned,
    swa_pool,
    target,
    v4_pool,
)

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

DCP_SIZES = (1, 2, 4, 8)


class TestSWASidecars(RoundTrip):
    def test_a_window_draft_follows_the_windows_slots(self):
        """An SWA allocator does not widen; an MLA target still shards its rows."""
        for page_size, dcp_size in itertools.product((8, 16), DCP_SIZES):
            with (
                self.subTest(page=page_size, dcp=dcp_size),
                cpu_host_pools(dcp_size=dcp_size),
            ):
                size = PAGES * page_size
                window = mla_pool(size, page_size)
                host = mla_host_pool(window, page_size=page_size, dcp_size=dcp_size)
                draft = swa_pool(size, page_size)
                pools = register_draft(
                    draft, {PoolName.SWA: (window, host)}, page_size=page_size
                )
                locs = torch.arange(page_size, size + page_size)
                sidecar = pools[PoolName.DRAFT_SWA]
                self.check(host, sidecar, draft.swa_kv_pool, locs)

    def test_a_paged_window_draft_follows_the_windows_slots(self):
        with cpu_host_pools():
            window, draft = v4_pool(PAGES * 64, 64), swa_pool(64, 64)
            # Registration reads the window half alone.
            draft.swa_kv_pool = v4_pool(PAGES * 64, 64)
            host = assembler.DeepSeekV4PagedHostPool(
                pool_name="swa",
                device_buffers=window.kv_buffer,
                item_bytes=window.bytes_per_page_padded,
                num_host_pages=2 * PAGES,
                slot_page_size=64,
            )
            pools = register_draft(draft, {PoolName.SWA: (window, host)}, page_size=64)
            sidecar = pools[PoolName.DRAFT_SWA]
            self.assertEqual(sidecar.kv_buffer[0].shape[0], 2 * PAGES)
            self.check(
                host,
                sidecar,
                draft.swa_kv_pool,
                torch.arange(64, PAGES * 64),
                buffers=draft.swa_kv_pool.kv_buffer,
                rows=torch.arange(1, PAGES),
            )

    def test_a_window_draft_with_full_locs_follows_the_full_slots(self):
        for page_size, dcp_size in itertools.product((8, 16), DCP_SIZES):
            with (
                self.subTest(page=page_size, dcp=dcp_size),
                cpu_host_pools(dcp_size=dcp_size),
            ):
                size = PAGES * page_size
                drafts = tuple(mha_pool(size, page_size, layer_num=1) for _ in "ab")
                group = assembler.build_hybrid_swa_group(
                    page_size=page_size,
                    full_kv_pool=mla_pool(size, page_size),
                    swa_kv_pool=mla_pool(size, page_size),
                    full_layer_mapping={0: 0},
                    swa_layer_mapping={1: 1},
                    use_mla=True,
                    mtp_swa_full_device_pools=drafts[:1],
                )
                self.check(
                    group.get_pool(PoolName.KV),
                    group.get_pool(PoolName.DRAFT_SWA),
                    drafts[0],
                    torch.arange(page_size, size + page_size),
                )


class TestIndexerSidecars(RoundTrip):
    def check_index(self, anchor, sidecar, pool, locs):
        rows = locs[:: pool.page_size] // pool.page_size
        buffers = pool.index_k_with_scale_buffer
        self.check(anchor, sidecar, pool, locs, buffers=buffers, rows=rows)

    def test_the_targets_index_keys_follow_every_slot(self):
        for dcp_size in DCP_SIZES:
            with self.subTest(dcp=dcp_size), cpu_host_pools(dcp_size=dcp_size):
                allocator, pool, host = target(64, dcp_size, make=dsa_pool)
                decl = dsa.make_dsa_indexer_pool_decl(pool)
                sidecar = dsa.DSAIndexerPoolHost(
                    decl=decl, anchor_host=host, pin_memory=False
                )
                self.check_index(host, sidecar, pool, drain(allocator))

    def test_a_drafts_index_keys_follow_every_slot(self):
        for dcp_size in DCP_SIZES:
            # Its index pages are the scheduled page.
            topology = test_utils.published_topology(
                device="cpu", tp_size=8, dcp_size=dcp_size, page_size=64
            )
            with (
                self.subTest(dcp=dcp_size),
                topology,
                cpu_host_pools(dcp_size=dcp_size),
            ):
                allocator, pool, host = target(64, dcp_size)
                draft = dsa_pool(*spanned(allocator), replicated=dcp_size > 1)
                pools = register_draft(
                    draft, {PoolName.KV: (pool, host)}, page_size=allocator.page_size
                )
                locs = drain(allocator)
                self.check_index(host, pools[PoolName.DRAFT_INDEXER], draft, locs)

    def test_a_page_interleaved_targets_index_keys_keep_its_rows(self):
        from sglang.srt.mem_cache.page_interleave import (
            PageInterleavePlacement,
            PageShardSpec,
        )
        from sglang.srt.mem_cache.pool_host.page_interleave import (
            PageInterleaveHostPool,
        )

        with cpu_host_pools():
            _, pool, rows = target(64, 1, make=dsa_pool)
            spec = PageShardSpec(
                shard_rank=0,
                shard_size=3,
                page_size=64,
                max_prefix_tokens=64,
                chunk_tokens=64,
            )
            host = PageInterleaveHostPool(rows, PageInterleavePlacement(spec))
            sidecar = dsa.DSAIndexerPoolHost(
                decl=dsa.make_dsa_indexer_pool_decl(pool),
                anchor_host=host,
                pin_memory=False,
            )
            self.assertEqual(host.logical_size, 3 * rows.size)
            self.assertEqual(sidecar.size, rows.size)
            tree = unified_tree(
                {PoolName.KV: (pool, host), PoolName.INDEXER: (pool, sidecar)},
                page_size=64,
            )
            tree.register_sidecar_pool(sidecar.decl.sidecar_spec())
            self.assertEqual(len(tree.sidecar_pool_specs), 1)


class TestQSAIndexerSidecars(RoundTrip):
    """Index keys of each four tokens, in pages of the pool that they follow."""

    def check_index(self, anchor, sidecar, pool, locs):
        ratio = pool.qsa_compress_ratio
        rows, buffers = locs[::ratio] // ratio, pool.qsa_compressed_k_buffer_pool
        self.check(anchor, sidecar, pool, locs, buffers=buffers, rows=rows)

    def test_qsa_index_keys_follow_every_slot(self):
        """Behind a host pool that shards its rows; no QSA target has one yet."""
        from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

        for dcp_size in DCP_SIZES:
            with self.subTest(dcp=dcp_size), cpu_host_pools(dcp_size=dcp_size):
                allocator, _, host = target(64, dcp_size)
                pool = qsa_pool(*spanned(allocator))
                sidecar = QSAIndexerPoolHost(pool, host)
                self.check_index(host, sidecar, pool, drain(allocator))

    def test_a_qsa_target_has_no_host_pool_under_dcp(self):
        from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

        for dcp_size in DCP_SIZES:
            with self.subTest(dcp=dcp_size), cpu_host_pools(dcp_size=dcp_size):
                pool = qsa_pool(PAGES * 64, 64)
                build = functools.partial(
                    assembler.build_kv_host_pool,
                    kv_pool=pool.full_kv_pool,
                    page_size=64 * dcp_size,
                )
                if dcp_size > 1:
                    with self.assertRaisesRegex(AssertionError, "MHA host pool has no"):
                        build()
                    continue
                host = build()
                sidecar = QSAIndexerPoolHost(pool, host)
                locs = torch.arange(64, pool.size + 64)
                self.check_index(host, sidecar, pool, locs)

    def test_a_qsa_drafts_index_keys_follow_every_slot(self):
        for dcp_size in DCP_SIZES:
            with self.subTest(dcp=dcp_size), cpu_host_pools(dcp_size=dcp_size):
                allocator, pool, host = target(64, dcp_size)
                draft = qsa_pool(*spanned(allocator))
                pools = register_draft(
                    draft, {PoolName.KV: (pool, host)}, page_size=allocator.page_size
                )
                sidecar = pools[PoolName.DRAFT_INDEXER]
                self.check_index(host, sidecar, draft, drain(allocator))


class TestAutoSize(CustomTestCase):
    def test_counts_the_rows_that_the_sidecar_has(self):
        from sglang.srt.mem_cache.hicache_auto_size import _draft_bytes

        for dcp_size in DCP_SIZES:
            with self.subTest(dcp=dcp_size), cpu_host_pools(dcp_size=dcp_size):
                allocator, pool, host = target(16, dcp_size)
                draft = mha_pool(*spanned(allocator))
                sidecar = register_draft(
                    draft, {PoolName.KV: (pool, host)}, page_size=allocator.page_size
                )[PoolName.DRAFT]
                # Device bytes times the ratio; the padding pages are its slack.
                counted = 2 * _draft_bytes(pool, draft)
                used = sidecar.size * sidecar.size_per_token
                page = allocator.page_size * sidecar.size_per_token
                self.assertAlmostEqual(counted, used, delta=2 * page)


if __name__ == "__main__":
    unittest.main()
