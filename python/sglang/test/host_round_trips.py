"""Round trips through a host pool: real pools on CPU, every slot, bytes compared."""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.test.host_pools import mla_host_pool
from sglang.test.test_utils import CustomTestCase

PAGES = 6
_COMMON = {"dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}


def mha_pool(size, page_size, layer_num=2):
    return MHATokenToKVPool(
        size=size,
        page_size=page_size,
        head_num=1,
        head_dim=2,
        layer_num=layer_num,
        **_COMMON,
    )


def mla_pool(size, page_size, layer_num=2):
    return MLATokenToKVPool(
        size=size,
        page_size=page_size,
        kv_lora_rank=2,
        qk_rope_head_dim=1,
        layer_num=layer_num,
        **_COMMON,
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
        **_COMMON,
        **kwargs,
    )


def qsa_pool(size, page_size):
    """Two attention layers of 16 index bytes to each four tokens."""
    from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

    return QSATokenToKVPool(
        size=size,
        page_size=page_size,
        head_num=1,
        head_dim=2,
        full_attention_layer_ids=[0, 1],
        mamba_pool=None,
        qsa_index_kv_heads=1,
        qsa_index_head_dim=8,
        qsa_compress_ratio=4,
        qsa_token_topk=4,
        num_request_slots=1,
        **_COMMON,
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
            for layer in range(sidecar.layer_num):
                sidecar.load_to_device_per_layer(
                    pool, slots, locs[: len(slots)], layer, "direct"
                )
            for buffer, then in zip(buffers, saved, strict=True):
                self.assertTrue(torch.equal(buffer[part], then))
