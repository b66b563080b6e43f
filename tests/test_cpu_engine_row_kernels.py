"""The stand-ins for row, cache and MLA kernels."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgeom.cpu_engine import flashinfer_mla, kernels

# req_to_token


@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 6),
    offset=st.integers(0, 3),
    writes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4
    ),
)
def test_row_writes_are_flat(rows, width, offset, writes):
    """Every entry lands at row * width + col of the memory, in a neighbour's row or nowhere."""
    memory = torch.full((offset + rows * width,), -1, dtype=torch.int32)
    table = memory[offset:].view(rows, width)
    spans = [(row, start, start + count) for row, start, count in writes]
    locs = torch.arange(100, 100 + sum(e - s for _, s, e in spans))
    want, value = memory.tolist(), 100
    for row, start, end in spans:
        for col in range(start, end):
            at = offset + row * width + col
            if at < len(want):
                want[at] = value
            value += 1
    kernels.assign_req_to_token_pool_cpu(*_columns(spans, table), locs, width)
    assert memory.tolist() == want
    # Reading the same spans back gives what memory holds, 0 where there is none.
    back = torch.full_like(locs, -5)
    kernels.assign_extend_cache_locs_cpu(*_columns(spans, table), back, width)
    flat = [offset + row * width + col for row, start, end in spans for col in range(start, end)]
    assert back.tolist() == [want[at] if at < len(want) else 0 for at in flat]


def _columns(spans, table):
    rows, starts, ends = (torch.tensor(list(column)) for column in zip(*spans, strict=True))
    return rows, table, starts, ends


def test_an_overlong_row_overwrites_its_neighbour():
    table = torch.zeros(3, 4, dtype=torch.int32)
    heard = []
    kernels.on_row_write = lambda *write: heard.append(write[1:])
    try:
        kernels.assign_req_to_token_pool_cpu(*_columns([(1, 2, 7)], table), torch.arange(11, 16), 4)
    finally:
        kernels.on_row_write = None
    assert table.tolist() == [[0, 0, 0, 0], [0, 0, 11, 12], [13, 14, 15, 0]]
    assert heard == [(1, 2, 7)]


def test_draft_locs_follow_the_sequence():
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    out = torch.zeros(2 * 6, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([1, 0]), table, torch.tensor([2, 3]), out, 10, 2, 3
    )
    assert out.tolist() == [12, 13, 14, 15, 16, 17, 3, 4, 5, 6, 7, 8]


def test_cache_rows_are_moved_reads_first():
    buffers = [torch.arange(12.0).view(4, 3), torch.arange(4).view(4, 1)]
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64),
        torch.tensor([b.stride(0) * b.element_size() for b in buffers]),
        torch.tensor([1, 2]),
        torch.tensor([0, 1]),
    )
    assert buffers[0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [9, 10, 11]]
    assert buffers[1].flatten().tolist() == [0, 0, 1, 3]


def test_small_spec_ops():
    bonus = torch.zeros(2, dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(torch.arange(10, 18), torch.tensor([3, 1]), bonus, 4)
    assert bonus.tolist() == [12, 14]
    packed = torch.full((4,), -1)
    kernels.fill_accept_out_cache_loc_cpu(
        torch.tensor([[0, 2], [-1, 3]]), torch.tensor([50, 51, 52, 53]), packed
    )
    assert packed.tolist() == [50, 52, 53, -1]
    ids = torch.tensor([1, 2, 3, 4, 5])
    kernels.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[8], [9]])
    )
    assert ids.tolist() == [2, 3, 8, 5, 9]


# MLA


def test_sharded_mla_decode_merges_to_the_whole():
    """Per-rank outputs merged by their LSE equal attention over all positions, causal per token."""
    generator = torch.Generator().manual_seed(0)
    world, total, q_len, heads, rank_dim, rope, page = 4, 13, 3, 2, 6, 2, 4
    latent = torch.randn(total, rank_dim + rope, generator=generator)
    query = torch.randn(1, q_len, heads, rank_dim + rope, generator=generator)
    whole = torch.zeros(q_len, heads, rank_dim)
    for q in range(q_len):
        seen = latent[: total - q_len + q + 1]
        weights = (query[0, q] @ seen.T * 0.5).softmax(-1)
        whole[q] = weights @ seen[:, :rank_dim]
    parts, lses = [], []
    for rank in range(world):
        mine = latent[rank::world]
        cache = torch.full((3, page, rank_dim + rope), 9e9)
        cache[[2, 0][: -(-len(mine) // page)]] = torch.cat(
            [mine, torch.zeros(-len(mine) % page, rank_dim + rope)]
        ).view(-1, page, rank_dim + rope)
        out, lse = flashinfer_mla.trtllm_batch_decode_with_kv_cache_mla(
            query=query,
            kv_cache=cache,
            kv_lora_rank=rank_dim,
            block_tables=torch.tensor([[2, 0]]),
            seq_lens=torch.tensor([len(mine)]),
            bmm1_scale=0.5,
            return_lse=True,
            enable_dcp=True,
            cp_world=world,
            cp_rank=rank,
            causal_seqlens_kv_global=torch.tensor([total]),
        )
        parts.append(out[0])
        lses.append(lse)
    weights = torch.stack(lses).softmax(0)[..., None]
    torch.testing.assert_close((weights * torch.stack(parts)).sum(0), whole)


def test_ragged_attention_aligns_the_ends():
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(5, 2, 4, generator=generator)
    key, value = (torch.randn(8, 2, 4, generator=generator) for _ in range(2))
    out, lse = flashinfer_mla.trtllm_ragged_attention_deepseek(
        query=query,
        key=key,
        value=value,
        batch_size=3,
        bmm1_scale=0.3,
        cum_seq_lens_q=torch.tensor([0, 2, 4, 5]),
        cum_seq_lens_kv=torch.tensor([0, 5, 8, 8]),
        is_causal=True,
        return_lse=True,
    )
    for q, keys in ((0, range(4)), (1, range(5)), (2, range(5, 7)), (3, range(5, 8))):
        for h in range(2):
            scores = torch.stack([query[q, h] @ key[k, h] * 0.3 for k in keys])
            want = scores.softmax(0) @ value[list(keys), h]
            torch.testing.assert_close(out[q, h], want)
            torch.testing.assert_close(lse[q, h], scores.logsumexp(0))
    assert out[4].eq(0).all() and lse[4].eq(-torch.inf).all()
