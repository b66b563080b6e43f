"""Faults put into a rank by name, to show what a check or the bounds mode says about them."""

from __future__ import annotations

import importlib

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


_FAULTS = {"draft-page": _scheduled_draft_page, "no-assertion": _without_assertion}


def inject(names: tuple[str, ...]) -> None:
    """Put each named fault into this process; EngineSetupError where its place is not there."""
    for name in names:
        _FAULTS[name]()
