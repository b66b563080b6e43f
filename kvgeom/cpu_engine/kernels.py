"""Torch stand-ins for the sgl_kernel CPU ops that the engine calls, written from their contracts.

Writes into `req_to_token` go to `row * pool_len + col` of the tensor's storage, as the CUDA kernels
do: a row that is too long lands in the neighbour's row. What falls outside the storage is dropped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

# Called with (source buffers, target buffers, source rows, target rows) before rows go between
# device and host; bounds mode raises in it.
on_transfer: Callable[[list, list, torch.Tensor, torch.Tensor], None] | None = None
# Called before each row write with (req_to_token, row, start, end); bounds mode raises in it.
on_row_write: Callable[[torch.Tensor, int, int, int], None] | None = None


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as one flat tensor of its dtype."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def _rows(req_pool_indices, start_offset, end_offset):
    return zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)


def _flat_read(table: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """`count` entries from flat position `first` on; entries outside the storage read as 0."""
    flat = _storage(table)
    first += table.storage_offset()
    values = flat.new_zeros(count)
    lo, hi = max(first, 0), min(first + count, flat.numel())
    if lo < hi:
        values[lo - first : hi - first] = flat[lo:hi]
    return values


def flat_write(table: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """Put `values` at flat position `first`; what lies outside the storage is dropped."""
    flat = _storage(table)
    first += table.storage_offset()
    lo, hi = max(first, 0), min(first + values.numel(), flat.numel())
    if lo < hi:
        flat[lo:hi] = values[lo - first : hi - first].to(flat.dtype)


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
) -> None:
    """req_to_token[row, start:end] = the next (end - start) entries of out_cache_loc."""
    used = 0
    for row, start, end in _rows(req_pool_indices, start_offset, end_offset):
        if on_row_write is not None:
            on_row_write(req_to_token, row, start, end)
        count = max(end - start, 0)
        flat_write(req_to_token, row * pool_len + start, out_cache_loc[used : used + count])
        used += count


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
) -> None:
    """out_cache_loc = req_to_token[row, start:end] of every request, one after the other."""
    used = 0
    for row, start, end in _rows(req_pool_indices, start_offset, end_offset):
        count = max(end - start, 0)
        values = _flat_read(req_to_token, row * pool_len + start, count)
        out_cache_loc[used : used + count] = values.to(out_cache_loc.dtype)
        used += count


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
) -> None:
    """topk * num_steps locs of each request, from its sequence length on."""
    count = topk * num_steps
    flat = out_cache_loc.view(-1)
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for i, (row, start) in enumerate(rows):
        values = _flat_read(req_to_token, row * pool_len + start, count)
        flat[i * count : (i + 1) * count] = values.to(flat.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc) -> None:
    """Copy the row src_loc[i] (`stride` bytes) to tgt_loc[i] in every buffer, reads first."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + loc * stride, stride) for loc in sources]
        for loc, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + loc * stride, row, stride)


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    """Rows src_indices of each source layer go to dst_indices; both list whole pages in order."""
    if on_transfer is not None:
        on_transfer(src_layers, dst_layers, src_indices, dst_indices)
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride) -> None:
    """bonus_tokens[i] = the last accepted token of request i."""
    first = torch.arange(accept_lens.numel()) * accept_stride
    picked = accept_tokens.reshape(-1)[first + accept_lens.long() - 1]
    bonus_tokens[: picked.numel()] = picked.to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """The locs of the accepted tokens (accept_index >= 0), packed to the front."""
    flat = accept_index.reshape(-1)
    kept = flat[flat >= 0].long()
    accept_out_cache_loc[: kept.numel()] = out_cache_loc[kept].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None
) -> None:
    """Shift each request's ids left by one; topk_index[i, 0] goes to the end (or select_index)."""
    spans = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for i, (start, count) in enumerate(spans):
        input_ids[start : start + count - 1] = input_ids[start + 1 : start + count].clone()
        last = start + count - 1 if select_index is None else int(select_index[i])
        input_ids[last] = topk_index[i].reshape(-1)[0]
