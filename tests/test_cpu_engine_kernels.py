"""The torch stand-ins against oracles that count by hand. Needs torch, not sglang."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgeom.cpu_engine import flashinfer_mla, kernels, tree_kernels


class Tree:
    """A draft tree as the draft loop grows it, kept as parent candidates and chosen nodes.

    Step 0 draws topk candidates from the root; each later step draws topk from each of the topk
    candidates that the step before expanded.
    """

    def __init__(self, draw, topk: int, steps: int, draft_tokens: int):
        self.topk, self.n = topk, draft_tokens
        parent_of = dict.fromkeys(range(topk))
        self.parent_list = [-1, *range(topk)]
        expanded = list(range(topk))
        for step in range(1, steps):
            first = topk + topk * topk * (step - 1)
            new = {first + j * topk + k: expanded[j] for j in range(topk) for k in range(topk)}
            parent_of |= new
            expanded = draw(st.permutations(sorted(new)))[:topk]
            self.parent_list += expanded
        # The last step's candidates expand nothing; after one step there is no list at all.
        self.parent_list = self.parent_list[: 1 + topk * (steps - 1)] if steps > 1 else []
        chosen: set[int] = set()
        while len(chosen) < draft_tokens - 1:  # a node can only be chosen after its parent
            open_ = sorted(
                c for c, p in parent_of.items() if c not in chosen and (p is None or p in chosen)
            )
            chosen.add(draw(st.sampled_from(open_)))
        self.selected = sorted(chosen)
        node = {c: i + 1 for i, c in enumerate(self.selected)}
        self.parent = {node[c]: node.get(parent_of[c], 0) for c in self.selected}

    def ancestors(self, node: int) -> set[int]:
        found = set()
        while node:
            node = self.parent[node]
            found.add(node)
        return found

    def children(self, node: int) -> list[int]:
        return [c for c in range(1, self.n) if self.parent[c] == node]

    def links(self) -> tuple[list[int], list[int]]:
        first = [(self.children(i) or [-1])[0] for i in range(self.n)]
        sibling = [-1] * self.n
        for i in range(1, self.n):
            later = [c for c in self.children(self.parent[i]) if c > i]
            sibling[i] = (later or [-1])[0]
        return first, sibling


@st.composite
def batches(draw):
    """(trees of one shape, their sequence lengths)"""
    topk, steps = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    most = topk + topk * topk * (steps - 1)
    draft_tokens = 1 + draw(st.integers(1, min(most, 12)))
    count = draw(st.integers(1, 3))
    trees = [Tree(draw, topk, steps, draft_tokens) for _ in range(count)]
    return trees, steps, draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))


def build(trees, steps, seq_lens, mode):
    """Run the op as SGLang does: links at -1, the prefix of a full mask set."""
    n, batch = trees[0].n, len(trees)
    width = [s + n if mode == tree_kernels.FULL_MASK else n for s in seq_lens]
    mask = torch.ones(sum(n * w for w in width), dtype=torch.bool)
    positions = torch.full((batch * n,), -7)
    index, child, sibling = (torch.full((batch, n), -1) for _ in range(3))
    tree_kernels.build_tree_kernel_efficient_cpu(
        torch.tensor([t.parent_list for t in trees], dtype=torch.long),
        torch.tensor([t.selected for t in trees]),
        torch.tensor(seq_lens),
        mask,
        positions,
        index,
        child,
        sibling,
        trees[0].topk,
        steps,
        n,
        mode,
    )
    rows = [
        part.view(n, w) for part, w in zip(mask.split([n * w for w in width]), width, strict=True)
    ]
    return rows, positions.view(batch, n), index, child, sibling


@pytest.mark.parametrize("mode", [tree_kernels.FULL_MASK, tree_kernels.QLEN_ONLY])
@given(case=batches())
@settings(max_examples=120, deadline=None)
def test_build_tree_matches_the_tree_walked_by_hand(mode, case):
    trees, steps, seq_lens = case
    masks, positions, index, child, sibling = build(trees, steps, seq_lens, mode)
    for b, (tree, seq_len) in enumerate(zip(trees, seq_lens, strict=True)):
        prefix = seq_len if mode == tree_kernels.FULL_MASK else 0
        for i in range(tree.n):
            seen = tree.ancestors(i) | {i}
            want = [True] * prefix + [j in seen for j in range(tree.n)]
            assert masks[b][i].tolist() == want
            assert positions[b, i] == seq_len + len(tree.ancestors(i))
            assert index[b, i] == b * tree.n + i
        assert [child[b].tolist(), sibling[b].tolist()] == list(tree.links())


@given(case=batches())
@settings(max_examples=120, deadline=None)
def test_the_mask_alone_gives_the_tree_back(case):
    trees, steps, seq_lens = case
    n, batch = trees[0].n, len(trees)
    masks, positions, index, child, sibling = build(trees, steps, seq_lens, tree_kernels.QLEN_ONLY)
    got = [torch.full((batch * n,), -7), *(torch.full((batch, n), -7) for _ in range(3))]
    tree_kernels.reconstruct_indices_from_tree_mask(
        torch.stack(masks).view(-1), torch.tensor(seq_lens), *got, batch, n
    )
    for have, want in zip(got, (positions.reshape(-1), index, child, sibling), strict=True):
        assert torch.equal(have, want)


def accepted_path(tree: Tree, tokens: list[int], target: list[int]) -> list[int]:
    """The deepest node whose whole path carries the target's tokens, as nodes from the root."""
    best = [0]
    for node in range(1, tree.n):
        path = sorted(tree.ancestors(node) | {node})
        right = all(tokens[i] == target[tree.parent[i]] for i in path[1:])
        if right and len(path) > len(best):
            best = path
    return best


@given(case=batches(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_verify_accepts_the_deepest_right_path(case, data):
    trees, steps, seq_lens = case
    n, batch = trees[0].n, len(trees)
    _, _, index, child, sibling = build(trees, steps, seq_lens, tree_kernels.QLEN_ONLY)
    target = data.draw(st.lists(st.integers(0, 2), min_size=n * batch, max_size=n * batch))
    candidates = torch.zeros(batch, n, dtype=torch.long)
    for b, tree in enumerate(trees):  # siblings never share a token: they are a top-k
        for i in range(n):
            for rank, c in enumerate(tree.children(i)):
                candidates[b, c] = rank
    depth = steps + 1
    accept_index = torch.full((batch, depth), -1, dtype=torch.int32)
    accept_num, predicts = torch.zeros(batch, dtype=torch.int32), torch.full((batch * n,), -7)
    tree_kernels.verify_tree_greedy_cpu(
        predicts,
        accept_index,
        accept_num,
        candidates,
        index,
        child,
        sibling,
        torch.tensor(target).view(batch, n),
    )
    for b, tree in enumerate(trees):
        want = target[b * n : (b + 1) * n]
        path = accepted_path(tree, candidates[b].tolist(), want)
        assert accept_num[b] == len(path) - 1
        flat = [b * n + node for node in path]
        assert accept_index[b].tolist() == flat + [-1] * (depth - len(path))
        for node in range(n):
            assert predicts[b * n + node] == (want[node] if node in path else -7)


def test_verify_stops_where_accept_index_is_full():
    chain = torch.tensor([[1, 2, 3, -1]])
    accept_index = torch.full((1, 2), -1)
    accept_num, predicts = torch.zeros(1, dtype=torch.int32), torch.full((4,), -7)
    tree_kernels.verify_tree_greedy_cpu(
        predicts,
        accept_index,
        accept_num,
        torch.tensor([[9, 5, 5, 5]]),
        torch.arange(4)[None],
        chain,
        torch.full((1, 4), -1),
        torch.tensor([[5, 5, 5, 5]]),
    )
    assert (accept_index.tolist(), accept_num.tolist()) == ([[0, 1]], [1])
    assert predicts.tolist() == [5, 5, -7, -7]


def test_a_node_without_its_parent_gets_no_link():
    child, sibling = torch.full((1, 2), -1), torch.full((1, 2), -1)
    tree_kernels.build_tree_kernel_efficient_cpu(
        torch.tensor([[-1, 0, 1]]),
        torch.tensor([[4]]),  # drawn from candidate 1, which is not selected
        torch.tensor([0]),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(2, dtype=torch.long),
        torch.zeros(1, 2, dtype=torch.long),
        child,
        sibling,
        2,
        2,
        2,
        tree_kernels.QLEN_ONLY,
    )
    assert (child.tolist(), sibling.tolist()) == ([[-1, -1]], [[-1, -1]])


def test_bit_packed_masks_are_refused():
    with pytest.raises(NotImplementedError, match="tree_mask_mode 2"):
        tree_kernels.build_tree_kernel_efficient_cpu(*[None] * 11, 2)


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
