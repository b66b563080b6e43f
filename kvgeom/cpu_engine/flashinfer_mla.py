"""Torch stand-ins for the FlashInfer kernels behind the trtllm_mla and cutedsl_mla backends.

Heads H, query length Q (tokens a request decodes or verifies at once), latent row D = kv_lora_rank
+ qk_rope_head_dim. Softmax statistics (LSE) are natural logarithms.
"""

from __future__ import annotations

import types

import torch


def _attend(query, key, value, allowed):
    """One request: query [Q, H, D], key [K, H or 1, D], value likewise, allowed [Q, K].

    Returns output [Q, H, Dv] and LSE [Q, H]; a query that may see nothing gets 0 and -inf.
    """
    scores = torch.einsum("qhd,khd->hqk", query, key.expand(-1, query.shape[1], -1))
    scores = scores.masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
    output = torch.einsum("hqk,khd->qhd", weights, value.expand(-1, query.shape[1], -1))
    return output, lse.T


def trtllm_batch_decode_with_kv_cache_mla(
    query,
    kv_cache,
    *,
    kv_lora_rank: int,
    block_tables,
    seq_lens,
    bmm1_scale,
    return_lse: bool = False,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global=None,
    **unused,
):
    """Absorbed MLA over paged latent rows: query [B, Q, H, D], kv_cache [..., page, D].

    With enable_dcp this rank holds the positions cp_rank, cp_rank + cp_world, ... of the
    causal_seqlens_kv_global[b] positions. Returns output [B, Q, H, kv_lora_rank], and with
    return_lse also the LSE [B * Q, H].
    """
    batch, q_len, heads, dim = query.shape
    page = kv_cache.shape[-2]
    rows = kv_cache.reshape(-1, dim)
    output = query.new_zeros(batch, q_len, heads, kv_lora_rank)
    lse = torch.full((batch, q_len, heads), -torch.inf)
    for b, held in enumerate(seq_lens.tolist()):
        if held == 0:
            continue
        local = torch.arange(held)
        latent = rows[block_tables[b, local // page].long() * page + local % page]
        total, position = held, local
        if enable_dcp:
            total, position = int(causal_seqlens_kv_global[b]), local * cp_world + cp_rank
        last_seen = total - q_len + torch.arange(q_len)
        output[b], lse[b] = _attend(
            query[b] * float(bmm1_scale),
            latent[:, None],
            latent[:, None, :kv_lora_rank],
            position <= last_seen[:, None],
        )
    return (output, lse.view(batch * q_len, heads)) if return_lse else output


def trtllm_ragged_attention_deepseek(
    *,
    query,
    key,
    value,
    batch_size: int,
    bmm1_scale,
    cum_seq_lens_q,
    cum_seq_lens_kv,
    is_causal: bool,
    return_lse: bool,
    out=None,
    **unused,
):
    """Attention of packed requests: query [T, H, D], key / value [S, H, *], cumulative lengths.

    Causal masks align the ends of query and key. Returns [T, H, Dv], and with return_lse [T, H].
    """
    output = query.new_zeros(*query.shape[:2], value.shape[-1]) if out is None else out
    lse = torch.full(query.shape[:2], -torch.inf)
    q_ends, k_ends = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
    for b in range(batch_size):
        q, k = slice(*q_ends[b : b + 2]), slice(*k_ends[b : b + 2])
        q_len, k_len = q.stop - q.start, k.stop - k.start
        if q_len == 0 or k_len == 0:
            continue
        allowed = torch.ones(q_len, k_len, dtype=torch.bool)
        if is_causal:
            allowed = allowed.tril(k_len - q_len)
        output[q], lse[q] = _attend(query[q] * float(bmm1_scale), key[k], value[k], allowed)
    return (output, lse) if return_lse else output


def fixup_zero_kv_rows(out, lse, kv_lens, cum_seq_lens, max_seq_len) -> None:
    """Output 0 and LSE -inf for the queries of requests without keys."""
    ends = cum_seq_lens.tolist()
    for b, kv_len in enumerate(kv_lens.tolist()):
        if kv_len == 0:
            out[ends[b] : ends[b + 1]] = 0
            lse[ends[b] : ends[b + 1]] = -torch.inf


class UnusedWrapper:
    """A FlashInfer wrapper that the backends build but never call on the paths used here."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name: str):
        raise NotImplementedError(f"the FlashInfer wrapper's {name} has no stand-in")


flashinfer = types.SimpleNamespace(
    decode=types.SimpleNamespace(
        trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla
    ),
    prefill=types.SimpleNamespace(
        trtllm_ragged_attention_deepseek=trtllm_ragged_attention_deepseek
    ),
)
