"""Attention over a paged KV cache (Kwon et al., 2023, arXiv 2309.06180), for any mix of query lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["paged_attention"]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of each sequence's newest tokens to all of its KV, their own included.

    Sequence ``i`` has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``; they are the last tokens of its
    ``seq_lens[i]`` positions, whose KV is in the cache already. One new token is decode, all of them a whole prefill,
    anything between a chunk.

    Args:
        query: [num_tokens, num_heads, head_dim].
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        value_cache: As ``key_cache``.
        block_tables: [num_seqs, max_num_blocks] int32; entries past a sequence's length are not read.
        cu_seqlens_q: [num_seqs + 1] int32, running sum of the query lengths.
        seq_lens: [num_seqs] int32, at least each sequence's query length.
        scale: Of the scores, usually ``head_dim ** -0.5``.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    block_size = key_cache.shape[1]
    bounds = cu_seqlens_q.tolist()
    output = torch.empty_like(query)
    for i, seq_len in enumerate(seq_lens.tolist()):
        blocks = block_tables[i, : -(-seq_len // block_size)]
        key = key_cache.index_select(0, blocks).flatten(0, 1)[:seq_len]  # [seq_len, num_kv_heads, head_dim]
        value = value_cache.index_select(0, blocks).flatten(0, 1)[:seq_len]
        rows = slice(bounds[i], bounds[i + 1])
        output[rows] = _attend(query[rows], key, value, scale)
    return output


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of one sequence: [query_len, num_heads, head_dim] over [seq_len, num_kv_heads, head_dim]."""
    query_len, num_heads, head_dim = query.shape
    seq_len, num_kv_heads, _ = key.shape
    if query_len == 1:
        # The query heads that share a KV head become the rows of one small matrix: KV is not repeated for them.
        rows = query.view(num_kv_heads, num_heads // num_kv_heads, head_dim)
        attended = functional.scaled_dot_product_attention(
            rows.unsqueeze(0), key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0), scale=scale
        )
        return attended.view(1, num_heads, head_dim)
    mask = None
    if query_len != seq_len:
        ahead = torch.arange(seq_len) - (seq_len - query_len)  # position relative to the first query
        mask = ahead <= torch.arange(query_len).unsqueeze(1)  # [query_len, seq_len]
    attended = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)
