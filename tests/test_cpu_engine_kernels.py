"""The torch stand-ins against oracles that count by hand. Needs torch, not sglang."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgeom.cpu_engine import tree_kernels


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
@settings(max_examples=120)
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
@settings(max_examples=120)
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
@settings(max_examples=150)
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
