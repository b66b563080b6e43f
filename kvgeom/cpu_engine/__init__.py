"""SGLang's real Engine on a machine without a GPU, at any tensor and decode-context parallelism.

The scheduler, model runner, configurator, draft worker, allocators, pools and radix cache are
SGLang's own. What stands in for them: the `sgl_kernel` ops (`kernels`, `tree_kernels`), the
FlashInfer MLA kernels (`flashinfer_mla`), and the gates that refuse a CPU (`gates`).
"""

from kvgeom.cpu_engine.session import Session, run, session
from kvgeom.cpu_engine.spec import (
    AllocatorGeometry,
    EngineError,
    EngineReport,
    EngineSetupError,
    EngineSpec,
    HostPoolGeometry,
    PoolGeometry,
    RankGeometry,
    ReqToTokenGeometry,
    Violation,
)

__all__ = [
    "AllocatorGeometry",
    "EngineError",
    "EngineReport",
    "EngineSetupError",
    "EngineSpec",
    "HostPoolGeometry",
    "PoolGeometry",
    "RankGeometry",
    "ReqToTokenGeometry",
    "Session",
    "Violation",
    "run",
    "session",
]
