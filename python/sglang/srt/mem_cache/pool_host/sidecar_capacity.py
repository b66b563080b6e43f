"""Capacity of a host pool that follows another host pool's slots.

    anchor    hands out slots [0, logical_size), dcp_size of them for one row
    sidecar   is indexed by those slots raw, so it has a row for each
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache


class SlotOwner(Protocol):
    """A host pool, or a group of them, that hands out slots."""

    logical_size: int


def tokens(anchor: SlotOwner) -> int:
    """What a sidecar of `anchor` holds: one per slot, never per row of this rank."""
    return anchor.logical_size


def ratio(anchor: SlotOwner, device_pool: KVCache) -> float:
    """`tokens` over `device_pool.size`, for constructors that take a ratio. They
    truncate the product, which half a token keeps from losing one."""
    return (tokens(anchor) + 0.5) / device_pool.size
