"""Torch stand-ins for the speculative tree ops, for any tree: topk wide, `depth` deep.

A node is a position 0 .. draft_token_num - 1 in a request's verify block; 0 is the root (the last
token that is certain). `selected_index[b, n - 1]` is the flat candidate number of node n: candidate
c was drawn from the c // topk-th expanded parent, and parent 0 is the root. For the others
`parent_list[b, c // topk]` is the candidate number of the parent.
"""

from __future__ import annotations

import torch

FULL_MASK, QLEN_ONLY = 0, 1  # TreeMaskMode; bit packing has no CPU user


def _parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """Parent node of nodes 1 .. n; -1 where the parent itself was not selected."""
    node_of = {}
    for node, candidate in enumerate(selected, start=1):
        node_of.setdefault(candidate, node)
    parents = []
    for candidate in selected:
        group = candidate // topk
        parents.append(0 if group == 0 else node_of.get(parent_list[group], -1))
    return parents


def _path_to_root(node: int, parents: list[int], depth: int) -> list[int]:
    """`node` and its ancestors below the root, at most `depth` of them."""
    path = []
    while node > 0 and len(path) < depth:
        path.append(node)
        node = parents[node - 1]
    return path


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill the verify block's mask, positions and child / sibling links, all given as buffers.

    The mask is flat: per request and node a row of draft_token_num columns, in FULL_MASK mode after
    seq_len prefix columns, which the caller has set. The links come filled with -1.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree_mask_mode {int(tree_mask_mode)} has no CPU stand-in")
    n = draft_token_num
    mask, flat_positions = tree_mask.view(-1), positions.view(-1)
    parent_rows, selected_rows = parent_list.tolist(), selected_index.tolist()
    row_start = 0
    for b, seq_len in enumerate(verified_seq_len.tolist()):
        parents = _parents(parent_rows[b], selected_rows[b][: n - 1], topk)
        prefix = seq_len if tree_mask_mode == FULL_MASK else 0
        for node in range(n):
            path = _path_to_root(node, parents, depth)
            row = torch.zeros(n, dtype=mask.dtype)
            row[[0, *path]] = 1
            mask[row_start + prefix : row_start + prefix + n] = row
            row_start += prefix + n
            flat_positions[b * n + node] = seq_len + len(path)
            retrive_index[b, node] = b * n + node
        _link_children(parents, retrive_next_token[b], retrive_next_sibling[b])


def _link_children(parents: list[int], next_token, next_sibling) -> None:
    """next_token[p] = p's first child; next_sibling chains the children in ascending order."""
    last_child: dict[int, int] = {}
    for node, parent in enumerate(parents, start=1):
        if parent < 0:
            continue
        if parent in last_child:
            next_sibling[last_child[parent]] = node
        else:
            next_token[parent] = node
        last_child[parent] = node


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """Walk down from the root while a child carries the token that the target predicts.

    accept_index[b] gets the flat indices of the accepted nodes, root first; accept_token_num[b] how
    many drafts were accepted; predicts the target's token at each accepted node.
    """
    target = target_predict.reshape(-1).tolist()
    index, tokens = retrive_index.tolist(), candidates.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for b in range(len(tokens)):
        node, accepted = 0, [index[b][0]]
        while True:
            wanted = target[index[b][node]]
            predicts[index[b][node]] = wanted
            if len(accepted) == accept_index.shape[1]:
                break
            found = child[b][node]
            while found != -1 and tokens[b][found] != wanted:
                found = sibling[b][found]
            if found == -1:
                break
            node = found
            accepted.append(index[b][node])
        accept_index[b, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[b] = len(accepted) - 1


def reconstruct_indices_from_tree_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links from the mask alone: mask[b, i, j] marks node j as an ancestor of i.

    Every entry of the four outputs is written; a node without parent has no sibling.
    """
    n = draft_token_num
    ancestors = tree_mask.reshape(batch_size, n, n).bool().tril(-1).tolist()
    flat_positions = positions.view(-1)
    out_index, out_child = retrive_index.view(-1), retrive_next_token.view(-1)
    out_sibling = retrive_next_sibling.view(-1)
    for b, seq_len in enumerate(verified_seq_len.tolist()):
        parents = [max((j for j in range(i) if ancestors[b][i][j]), default=-1) for i in range(n)]
        for i in range(n):
            later = range(i + 1, n)
            below = (k for k in later if ancestors[b][k][i])
            beside = (k for k in later if parents[k] == parents[i] >= 0)
            flat_positions[b * n + i] = seq_len + sum(ancestors[b][i])
            out_index[b * n + i] = b * n + i
            out_child[b * n + i] = next(below, -1)
            out_sibling[b * n + i] = next(beside, -1)
