"""Watches every write into KV pools and req_to_token, and in bounds mode those of Triton kernels
and the rows of host pools.

Strict (bounds mode): a write past the end is reported and stopped before it is made. Otherwise it
goes where it would go on a GPU, past the end of its tensor: each pool buffer is followed by guard
rows, so that neither the write nor a later read of it leaves memory that this process owns. (Host
pools have none: there torch refuses the index.)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect

import torch

from kvgeom.cpu_engine import geometry, kernel_writes, kernels
from kvgeom.cpu_engine.spec import EngineSpec, Violation


class OutOfBoundsWrite(AssertionError):
    """Raised in bounds mode in place of the write."""


def wrap(owner, name: str, before) -> None:
    """Call `before(*args, **kwargs)` ahead of `owner.name`."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def call(*args, **kwargs):
        before(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(owner, name, call)


class Watch:
    """The writes of one rank. `on_row_end` hears of every new furthest req_to_token column."""

    def __init__(self, spec: EngineSpec, rank: int, report, on_row_end):
        self.strict, self.on_cpu = spec.bounds, spec.device == "cpu"
        self.rank, self.report, self.on_row_end = rank, report, on_row_end
        self.row_end = 0
        self.names: dict[int, str] = {}
        self.buffers: dict[int, str] = {}  # address of a device pool's buffer -> whose it is
        self.host_classes: dict[str, str] = {}
        self.allocator_page = 1
        # No allocator of this spec hands out a loc at or past this one.
        self.reach = (spec.max_total_tokens + 2 * spec.page) * spec.dcp

    def install(self) -> None:
        """Hook every write path in this process, before any pool exists."""
        from sglang.srt.mem_cache import allocation, memory_pool

        kernels.on_row_write = self.row_write
        kernels.on_transfer = self.transfer
        self._prefill_signature = inspect.signature(allocation.write_cache_indices)
        wrap(allocation, "write_cache_indices", self._prefill_rows)
        wrap(memory_pool.ReqToTokenPool, "write", self._pool_row)
        mha, mla = memory_pool.MHATokenToKVPool, memory_pool.MLATokenToKVPool
        if self.strict:
            wrap(mha, "set_kv_buffer", self._set_kv)
            wrap(mla, "set_kv_buffer", self._set_kv)
            wrap(mla, "set_mla_kv_buffer", self._set_mla)
            wrap(mha, "set_kv_buffer_prefix_valid", self._set_prefix)
            wrap(mha, "move_kv_cache", self._move)
            wrap(mla, "move_kv_cache", self._move)
            if self.on_cpu:
                kernel_writes.watch(self._kernel)
        elif self.on_cpu:
            self._add_guard(mha, "_create_buffers_normal", "k_buffer", "v_buffer")
            self._add_guard(mla, "_create_buffers", "kv_buffer")
            memory_pool._set_kv_buffer_impl = _store_rows

    def name_pools(self, scheduler) -> None:
        """Learn which pool is whose, once the scheduler has been built."""
        target, draft = scheduler.tp_worker.model_runner, geometry.draft_runner(scheduler)
        self.allocator_page = target.token_to_kv_pool_allocator.page_size
        for name, runner in (("target", target), ("draft", draft)):
            if runner is not None:
                self.names[id(runner.token_to_kv_pool)] = name
                for buffer in geometry.pool_buffers(runner.token_to_kv_pool):
                    self.buffers[buffer.data_ptr()] = name
        for key, pool in geometry.host_pools(scheduler).items():
            self.host_classes["target" if key == "kv" else key] = type(pool).__name__

    def transfer(self, sources: list, targets: list, source_rows, target_rows) -> None:
        """Rows go between device and host pools, the same ones in every buffer."""
        back = targets[0].data_ptr() in self.buffers
        name = self.buffers.get((targets if back else sources)[0].data_ptr(), "unknown")
        if self.rank == 0:
            way = "back" if back else "out"
            self.report("transfer", way=f"{name} {way}", rows=source_rows.numel() * len(targets))
        if self.strict:
            self._host(name, *((sources, source_rows) if back else (targets, target_rows)))

    def _host(self, name: str, buffers: list, rows: torch.Tensor) -> None:
        limit = min(buffer.shape[0] for buffer in buffers)
        bad = rows[(rows < 0) | (rows >= limit)]
        if bad.numel():
            index = int(bad[0])
            self._stop(
                f"{name} host pool: row {index} of {limit}",
                structure=f"{name} host",
                cls=self.host_classes.get(name, "unknown"),
                index=index,
                limit=limit,
            )

    # req_to_token

    def row_write(self, table: torch.Tensor, row: int, start: int, end: int) -> None:
        """A write of columns [start, end) of a row; the table is [rows, width]."""
        if end > self.row_end:
            self.row_end = end
            self.on_row_end(end)
        rows, width = table.shape
        if not self.strict or (start >= 0 and end <= width and 0 <= row < rows):
            return
        hit = row + (end - 1) // width
        where = f"row {hit}" if hit < rows else "memory past the table's end"
        self._stop(
            f"req_to_token row {row} columns [{start}, {end}) of {width}: would write into {where}",
            structure="req_to_token",
            cls="ReqToTokenPool",
            index=hit,
            limit=width,
            row=row,
            start=start,
            end=end,
        )

    def _prefill_rows(self, *args, **kwargs) -> None:
        call = self._prefill_signature.bind(*args, **kwargs).arguments
        table = call["req_to_token_pool"].req_to_token
        rows, seq_lens = call["req_pool_indices_cpu"].tolist(), call["seq_lens_cpu"].tolist()
        for row, seq_len in zip(rows, seq_lens, strict=True):
            self.row_write(table, row, 0, seq_len)

    def _pool_row(self, pool, indices, values) -> None:
        if isinstance(indices, tuple) and isinstance(indices[1], slice):
            row, columns = indices
            self.row_write(pool.req_to_token, int(row), columns.start or 0, columns.stop)

    # KV pools

    def _set_kv(self, pool, layer, loc_info, cache_k, cache_v, *args, **kwargs) -> None:
        loc, mask = getattr(loc_info, "loc", loc_info), kwargs.get("dcp_kv_mask")
        self._rows(pool, loc if mask is None else loc[mask.bool()])

    def _set_mla(self, pool, layer, loc_info, *args, **kwargs) -> None:
        from sglang.srt.runtime_context import get_parallel

        loc, span = getattr(loc_info, "loc", loc_info), pool._write_loc_dcp_span
        if span > 1:  # this rank stores the locs it owns
            loc = loc[loc % span == get_parallel().attn_dcp_rank] // span
        self._rows(pool, loc)

    def _set_prefix(self, pool, layer, loc_2d, commit_lens, *args, **kwargs) -> None:
        columns = torch.arange(loc_2d.shape[1])
        self._rows(pool, loc_2d[columns < commit_lens.view(-1, 1)])

    def _move(self, pool, tgt_loc, src_loc) -> None:
        self._rows(pool, tgt_loc)

    def _rows(self, pool, rows: torch.Tensor) -> None:
        limit = geometry.pool_rows(pool)
        bad = rows[(rows < 0) | (rows >= limit)]
        if bad.numel() == 0:
            return
        name = self.names.get(id(pool), "unknown")
        index = int(bad.reshape(-1)[0])
        loc = index * geometry.pool_divisor(pool, is_draft=name == "draft")
        page = loc // self.allocator_page
        self._stop(
            f"{name} pool {type(pool).__name__} (size {pool.size}, page {pool.page_size}): "
            f"write to row {index} of {limit}, loc {loc} in allocator page {page}",
            structure=name,
            cls=type(pool).__name__,
            index=index,
            limit=limit,
            loc=loc,
            allocator_page=page,
        )

    # kernels

    def _kernel(self, kernel: str, argument: str, element: int, elements: int) -> None:
        self._stop(
            f"kernel {kernel}: write to element {element} of {elements} of its {argument}",
            structure="kernel",
            cls=kernel,
            index=element,
            limit=elements,
        )

    def _stop(self, message: str, **fields) -> None:
        violation = Violation(rank=self.rank, message=f"rank {self.rank}: {message}", **fields)
        self.report("violation", violation=dataclasses.asdict(violation))
        raise OutOfBoundsWrite(violation.message)

    # guard rows

    def _add_guard(self, pool_class, name: str, *buffers: str) -> None:
        """After `pool_class.name` has made its buffers, put guard rows behind each of them."""
        make = getattr(pool_class, name)

        @functools.wraps(make)
        def made(pool):
            make(pool)
            for attribute in buffers:
                setattr(pool, attribute, [self._guarded(b) for b in getattr(pool, attribute)])

        setattr(pool_class, name, made)

    def _guarded(self, buffer: torch.Tensor) -> torch.Tensor:
        rows = buffer.shape[0]
        whole = buffer.new_zeros(max(rows, self.reach), *buffer.shape[1:])
        return whole[:rows]


def _store_rows(k, v, k_cache, v_cache, indices, *args, **kwargs) -> None:
    """Write k and v at `indices` with no regard for the buffers' end, as the CUDA kernel does."""
    for rows, cache in ((k, k_cache), (v, v_cache)):
        step = cache.stride(0)
        total = (cache.untyped_storage().nbytes() // cache.element_size()) // step
        whole = torch.as_strided(cache, (total, *cache.shape[1:]), cache.stride(), 0)
        whole[indices] = rows
