"""Faults put into a rank by name, to show what a check or the bounds mode says about them."""

from __future__ import annotations

import importlib

from kvgeom.cpu_engine.gates import View
from kvgeom.cpu_engine.spec import EngineSetupError


def _scheduled_draft_page() -> None:
    """Page the draft pool by the scheduled page: rows = size + page, without the dcp factor."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.runtime_context import get_schedule

    own = vars(KVCacheConfigurator).get("pool_page_size")
    if not isinstance(own, property):
        raise EngineSetupError(
            "fault draft-page: KVCacheConfigurator.pool_page_size is not a property"
        )

    def pool_page_size(self) -> int:
        return get_schedule().page_size if self.is_draft_worker else own.fget(self)

    KVCacheConfigurator.pool_page_size = property(pool_page_size)


def _without_assertion() -> None:
    """Take the boot assertion out; it is called through its module's attribute."""
    name, function = "sglang.srt.configurator.page_geometry_check", "check_page_geometry"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        module = None
    if not callable(getattr(module, function, None)):
        raise EngineSetupError(
            f"fault no-assertion: {name}.{function} is not in this tree; is the series applied?"
        )
    setattr(module, function, lambda *args, **kwargs: None)


def _physical_draft_host_pool() -> None:
    """Size the draft's host pool from this rank's rows of the target's, as 0.5.17 does.

    To whole pages of the draft, and one more, as pools made from a ratio are rounded.
    """
    from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler

    build = getattr(hybrid_pool_assembler, "build_full_draft_pools", None)
    if not callable(build):
        raise EngineSetupError(
            "fault draft-host-pool: hybrid_pool_assembler.build_full_draft_pools does not exist"
        )

    def build_full_draft_pools(*, draft_kv_pool, tree_cache):
        controller = tree_cache.cache_controller
        group = controller.mem_pool_host
        rows = (group.size // controller.page_size + 1) * controller.page_size
        physical = View(group, logical_size=rows)
        return build(
            draft_kv_pool=draft_kv_pool,
            tree_cache=View(tree_cache, cache_controller=View(controller, mem_pool_host=physical)),
        )

    hybrid_pool_assembler.build_full_draft_pools = build_full_draft_pools


def _without_draft_load_back() -> None:
    """Leave a draft's evicted rows on the host. MHA host pools are the draft's in pair mla."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    if "load_to_device_per_layer" not in vars(MHATokenToKVPoolHost):
        raise EngineSetupError(
            "fault draft-load-back: MHATokenToKVPoolHost.load_to_device_per_layer does not exist"
        )
    MHATokenToKVPoolHost.load_to_device_per_layer = lambda *args, **kwargs: None


_FAULTS = {
    "draft-page": _scheduled_draft_page,
    "no-assertion": _without_assertion,
    "draft-host-pool": _physical_draft_host_pool,
    "draft-load-back": _without_draft_load_back,
}


def inject(names: tuple[str, ...]) -> None:
    """Put each named fault into this process; EngineSetupError where its place is not there."""
    for name in names:
        _FAULTS[name]()
