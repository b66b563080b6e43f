"""The gates of HiCache (host pools), for SGLang 0.5.23. See `gates`."""

from __future__ import annotations

from types import ModuleType

from kvgeom.cpu_engine import kernels
from kvgeom.cpu_engine.gates import gate


@gate(
    "sglang.srt.mem_cache.pool_host.common",
    why="page-locks host memory through the CUDA runtime",
    expects={"_cuda_host_register": "buffer registration_granularity_bytes"},
)
def host_memory_as_it_is(module: ModuleType) -> None:
    module._cuda_host_register = lambda buffer, registration_granularity_bytes=None: None


@gate(
    "sglang.srt.mem_cache.pool_host.base",
    why="keeps 10 GiB of the machine free, more than these pools will ever be",
    expects={"HICACHE_HOST_MEMORY_RESERVE_BYTES": None},
)
def no_host_reserve(module: ModuleType) -> None:
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


@gate(
    "sglang.srt.mem_cache.pool_host.mla",
    why="imports its copy operations on GPUs only",
    expects={"_is_cuda": None},
)
def mla_transfers(module: ModuleType) -> None:
    module.transfer_kv_direct = kernels.transfer_kv_direct


@gate(
    "sglang.srt.mem_cache.pool_host.mha",
    why="imports its copy operations on GPUs only",
    expects={"_is_cuda": None},
)
def mha_transfers(module: ModuleType) -> None:
    module.transfer_kv_direct = kernels.transfer_kv_direct


@gate(
    "sglang.srt.mem_cache.l2_transfer",
    why="waits for the stream of a failed copy; a CPU stream has no wait, which hides the failure",
    expects={
        "torch": None,
        "L2TransferEngine._submission": "self transfers stream transfer_key start_event",
    },
)
def failed_transfers_say_why(module: ModuleType) -> None:
    module.torch.cpu.Stream.synchronize = lambda self: None
