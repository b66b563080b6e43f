"""The capacity of a host pool that follows another host pool's slots, as a ratio.

anchor    hands out slots [0, logical_size), dcp_size of them for one row
sidecar   is indexed by those slots raw: `anchor.sidecar_size` rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache


class SidecarAnchor(Protocol):
    """A host pool, or a group of them, whose slots other pools follow."""

    sidecar_size: int


def sidecar_ratio(anchor: SidecarAnchor, device_pool: KVCache) -> float:
    """`anchor.sidecar_size` over `device_pool.size`, for constructors that take a
    ratio. They truncate the product, which half a token keeps from losing one."""
    return (anchor.sidecar_size + 0.5) / device_pool.size
