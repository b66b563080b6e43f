"""Boot assertion: a sidecar host pool holds every slot that its anchor hands out.

O(1): reads integers, allocates nothing, touches no device.
"""

from __future__ import annotations

from typing import Protocol

from sglang.srt.mem_cache.hicache_storage import PoolName, SidecarPoolSpec
from sglang.srt.mem_cache.page_geometry import PageGeometryError
from sglang.srt.mem_cache.pool_host.sidecar_ratio import SidecarAnchor


class HostPools(Protocol):
    def get_pool(self, name: PoolName) -> SidecarAnchor: ...


def check_sidecar(*, spec: SidecarPoolSpec, host_pools: HostPools) -> None:
    """PageGeometryError unless the sidecar of `spec` covers the pool it follows."""
    check_host_pool(
        name=spec.pool_name,
        pool=host_pools.get_pool(spec.pool_name),
        anchor_name=spec.indices_from_pool,
        anchor=host_pools.get_pool(spec.indices_from_pool),
    )


def check_host_pool(
    *, name: PoolName, pool: SidecarAnchor, anchor_name: PoolName, anchor: SidecarAnchor
) -> None:
    """PageGeometryError unless `pool` has a row for every slot of `anchor`."""
    reaches, valid_to = anchor.sidecar_size, pool.sidecar_size
    if valid_to >= reaches:
        return
    code = "DRAFT" if name.value.startswith(PoolName.DRAFT.value) else "TARGET"
    raise PageGeometryError(
        f"{code}_HOST_POOL_MISMATCH pool={name} anchor={anchor_name} "
        f"reaches={reaches} valid_to={valid_to}"
    )
