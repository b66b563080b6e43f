"""A sidecar host pool holds every slot that the pool it follows hands out.

The oracle moves bytes: what leaves the device for a slot comes back from it, for
every loc of the allocator and every slot of the host pool, in real pools.
"""

import contextlib
import itertools
import unittest
from importlib.util import find_spec
from unittest.mock import patch

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

import torch

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.page_geometry import PageGeometryError
from sglang.srt.mem_cache.pool_host import sidecar_capacity
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.host_pools import (
    HAS_LEGACY_PATH,
    HAS_SIDECARS,
    cpu_host_pools,
    dsa,
    mla_host_pool,
    register_draft,
    register_legacy_draft,
)

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

PAGES = 6
DCP_SIZES = (1, 2, 4, 8)
PAGE_SIZES = (4, 16)
COMMON = {"dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
HAS_SWA_FULL = hasattr(assembler, "_mtp_swa_sidecar_specs")
HAS_INDEX_PAGES = hasattr(dsa, "make_dsa_indexer_pool_decl")
HAS_AUTO_SIZE = find_spec("sglang.srt.mem_cache.hicache_auto_size") is not None


def mha_pool(size, page_size, layer_num=2):
    return MHATokenToKVPool(
        size=size,
        page_size=page_size,
        head_num=1,
        head_dim=2,
        layer_num=layer_num,
        **COMMON,
    )


def mla_pool(size, page_size, layer_num=2):
    return MLATokenToKVPool(
        size=size,
        page_size=page_size,
        kv_lora_rank=2,
        qk_rope_head_dim=1,
        layer_num=layer_num,
        **COMMON,
    )


def swa_pool(size, page_size):
    return SWAKVPool(
        size=size,
        size_swa=size,
        page_size=page_size,
        dtype=torch.float32,
        head_num=1,
        head_dim=2,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[],
        device="cpu",
    )


def dsa_pool(size, page_size, replicated=False):
    kwargs = {"dcp_replicated": True} if replicated else {}
    return DSATokenToKVPool(
        size,
        page_size=page_size,
        kv_lora_rank=2,
        qk_rope_head_dim=1,
        kv_cache_dim=3,
        layer_num=2,
        index_head_dim=128,
        **COMMON,
        **kwargs,
    )


def v4_pool(size, page_size):
    return DeepSeekV4SingleKVPool(
        size,
        page_size,
        dtype=torch.float8_e4m3fn,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


DRAFTS = {"mha": mha_pool, "mla": mla_pool}
CASES = list(itertools.product(DRAFTS, PAGE_SIZES, DCP_SIZES))


def target(page_size, dcp_size, make=mla_pool):
    """(allocator, device pool, host pool) of a target; the first as widened."""
    pool = make(PAGES * page_size, page_size)
    allocator = PagedTokenToKVPoolAllocator(
        pool.size * dcp_size,
        page_size=page_size * dcp_size,
        dtype=torch.float32,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )
    host = mla_host_pool(pool, page_size=allocator.page_size, dcp_size=dcp_size)
    return allocator, pool, host


def drain(allocator):
    """Every loc that the allocator hands out, page by page."""
    return allocator.alloc(allocator.available_size())


def spanned(allocator):
    """Size and page of a pool that is indexed by the allocator's locs raw."""
    return allocator.size, allocator.page_size


def fill(buffers, seed):
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(1, 64, raw.shape, generator=generator))


@contextlib.contextmanager
def physical_rows(page_size):
    """Sidecars as if sized from the rows of their anchor."""
    rows = lambda anchor: -(-anchor.size // page_size) * page_size
    with (
        patch.object(sidecar_capacity, "tokens", rows),
        patch.object(
            sidecar_capacity, "ratio", lambda anchor, pool: anchor.size / pool.size
        ),
    ):
        yield


def layers(pool):
    if isinstance(pool, MHATokenToKVPool):
        return [*pool.k_buffer, *pool.v_buffer]
    return list(pool.kv_buffer)


class RoundTrip(CustomTestCase):
    def check(self, anchor, sidecar, pool, locs, *, buffers=None, rows=None):
        """Back up all of `locs` again and again until `anchor` has no slot left, then
        load each backup into an empty device pool. `rows` of `buffers` are theirs."""
        buffers = layers(pool) if buffers is None else buffers
        rows = locs if rows is None else rows
        backups = []
        while count := min(len(locs), anchor.available_size()):
            slots = anchor.alloc(count)
            part = rows[: count * len(rows) // len(locs)]
            fill(buffers, seed=len(backups))
            sidecar.backup_from_device_all_layer(pool, slots, locs[:count], "direct")
            backups.append((slots, part, [buffer[part].clone() for buffer in buffers]))
        self.assertGreater(len(backups), 1)
        for slots, part, saved in backups:
            for buffer in buffers:
                buffer.zero_()
            for layer in range(pool.layer_num):
                sidecar.load_to_device_per_layer(
                    pool, slots, locs[: len(slots)], layer, "direct"
                )
            for buffer, then in zip(buffers, saved, strict=True):
                self.assertTrue(torch.equal(buffer[part], then))


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
            physical_rows(allocator.page_size),
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


@unittest.skipUnless(HAS_SIDECARS, "no SWA sidecars here")
class TestSWASidecars(RoundTrip):
    def test_a_window_draft_follows_the_windows_slots(self):
        """An SWA allocator does not widen; an MLA target still shards its rows."""
        for name, (page_size, dcp_size) in itertools.product(
            ("mha",), itertools.product((8, 16), DCP_SIZES)
        ):
            with (
                self.subTest(name, page=page_size, dcp=dcp_size),
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
            pools = register_draft(
                draft, {PoolName.SWA: (window, host)}, page_size=64
            )
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

    @unittest.skipUnless(HAS_SWA_FULL, "no SWA draft with full locs here")
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


@unittest.skipUnless(HAS_INDEX_PAGES, "index keys are not replicated under DCP here")
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
            with self.subTest(dcp=dcp_size), cpu_host_pools(dcp_size=dcp_size):
                allocator, pool, host = target(64, dcp_size)
                draft = dsa_pool(*spanned(allocator), replicated=dcp_size > 1)
                pools = register_draft(
                    draft, {PoolName.KV: (pool, host)}, page_size=allocator.page_size
                )
                locs = drain(allocator)
                self.check_index(host, pools[PoolName.DRAFT_INDEXER], draft, locs)


@unittest.skipUnless(HAS_AUTO_SIZE, "host pools do not size themselves here")
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
